"""KServe's v1 `:predict`: all instances of a request at once, answered together."""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

import orjson
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tengserve_adapter.http.answer import answer_of, whole_answer
from tengserve_adapter.http.body import parse_body, read_body
from tengserve_adapter.http.disconnect import ClientDisconnected, while_connected
from tengserve_adapter.http.endpoints import Context, count_ignored
from tengserve_adapter.http.errors import response_for
from tengserve_adapter.http.sse import send_json
from tengserve_adapter.protocols import predict
from tengserve_adapter.protocols.call import Call
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ShuttingDownError

LABEL: Final = "/v1/models/{model}:predict"


class PredictEndpoint:
    """An ASGI endpoint."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing is raised but cancellation."""
        try:
            await self._serve(Request(scope), receive, send)
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a reply, the unexpected is logged
            await response_for(error)(scope, receive, send)

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        if self._context.draining():
            raise ShuttingDownError("The service is stopping and takes no new requests.")
        name: str = request.path_params["model"]
        engine = self._context.engine(name)
        calls = await parse_body(
            await read_body(receive),
            lambda body: predict.parse(
                body,
                engine.info,
                model_name=name,
                max_text_chars=self._context.settings.max_generate_text_chars,
                request_id=uuid.uuid4().hex,
            ),
        )
        for call in calls:
            count_ignored(LABEL, call.ignored)
        texts = await while_connected(request.scope, receive, _texts(engine, calls))
        await send_json(send, predict.answer(texts))


async def _texts(engine: Engine, calls: list[Call]) -> list[str]:
    """The first error ends the others, so that no instance goes on for an answer that nobody gets."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_text(engine, call)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _text(engine: Engine, call: Call) -> str:
    text: str = orjson.loads(answer_of(call.reply, await whole_answer(engine, call.request)))["text_output"]
    return text
