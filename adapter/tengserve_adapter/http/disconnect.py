"""Noticing that the client has left, whatever the server is waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientDisconnected(Exception):  # noqa: N818 - nobody's error: there is nobody left to tell
    """The client closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled as soon as the client leaves. No task outlives the call.

    The request's body must have been read whole, so that a disconnect is all that `receive` has left to say.

    Raises:
        ClientDisconnected: the client left first; `work` has ended by then.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
