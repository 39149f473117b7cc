"""Noticing that the client has left, whatever the server is waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope

from tengserve_adapter.http.body_rules import release_body

WATCH_AFTER_S: Final = 0.05

_T = TypeVar("_T")


class ClientDisconnected(Exception):  # noqa: N818 - nobody's error: there is nobody left to tell
    """The client closed the connection."""


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves, WATCH_AFTER_S late at most. No task outlives it.

    The request's body must have been read whole and parsed, so that a disconnect is all that `receive` has left to say;
    the body is released.

    Raises:
        ClientDisconnected: the client left first; `work` has ended by then.
    """
    release_body(scope)
    watch = _Watch(receive)
    try:
        return await work
    except (asyncio.CancelledError, Exception):  # The latter is what `work` makes of its cancellation.
        if watch.ended_work():
            raise ClientDisconnected from None
        raise
    finally:
        await watch.end()


class _Watch:
    """Cancels the task in which it is made when the client leaves, until `end`.

    A task beside each request would cost as much as a small request itself; so it starts only beside longer ones.
    """

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker: this is a coroutine
        self._receive = receive
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._ended = self._left = False
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def ended_work(self) -> bool:
        """Whether the task was cancelled because the client left, and for no other reason."""
        return self._left and self._task.uncancel() == 0

    async def end(self) -> None:
        """Watch no more."""
        self._ended = True
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self._left = True
            self._task.cancel()
