"""The edge of an ASGI endpoint: where every error ends as a reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tengserve_adapter.http.disconnect import ClientDisconnected


async def answered(
    work: Awaitable[None], respond: Callable[[BaseException], Response], scope: Scope, receive: Receive, send: Send
) -> None:
    """Await work that answers a request; nothing is raised but cancellation.

    Args:
        work: sends the answer. When it raises it has sent nothing, or there is nobody left to read.
        respond: the dialect's reply to an error; it logs the unexpected.
        scope, receive, send: of the request.
    """
    try:
        await work
    except ClientDisconnected:
        return
    except Exception as error:  # noqa: BLE001 - the edge: every error becomes a reply
        await respond(error)(scope, receive, send)
