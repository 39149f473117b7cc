"""A submitted request as its owner on the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tengserve_backend.engine.base import Tap
from tengserve_backend.errors import RequestAbortedError, TengserveError
from tengserve_backend.generation import TokenEvent


class GenerationHandle:
    """See engine.base.Generation. Everything here runs on one event loop; the engine's thread reaches it through
    `call_soon_threadsafe` only. The number of events is bounded by the request's output limit.

    Args:
        request_id, prompt_tokens: of the request.
        loop: the loop of the owner.
        on_abort: tells the engine, once.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, loop: asyncio.AbstractEventLoop, on_abort: Callable[[], None]
    ) -> None:
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self.loop = loop
        self._on_abort = on_abort
        self._events: deque[TokenEvent] = deque()
        self._error: Exception | None = None
        self._tap: Tap | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        """See Generation."""
        return self._request_id

    @property
    def prompt_tokens(self) -> int:
        """See Generation."""
        return self._prompt_tokens

    def __aiter__(self) -> GenerationHandle:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            # The engine ends every request by its deadline at the latest, and all of them when it dies.
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._events.popleft()

    def tap(self, tap: Tap) -> None:
        """See Generation."""
        self._tap = tap

    def abort(self) -> None:
        """See Generation."""
        if self._ended:
            return
        on_abort = self._on_abort
        self.fail(RequestAbortedError("The request was cancelled."))
        self._events.clear()
        on_abort()

    def deliver(self, event: TokenEvent) -> None:
        """Take an event from the engine; what comes after the end is dropped."""
        if self._ended or self._tapped(event):
            return
        self._events.append(event)
        self._ended = event.finish is not None
        self._wake()

    def fail(self, error: TengserveError) -> None:
        """End with an error, after the events that came before it."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._wake()

    def _tapped(self, event: TokenEvent) -> bool:
        """Whether that was all: while nobody waits for an event, earlier ones may still be on their way."""
        waits = self._reader is not None and not self._reader.done()
        if self._tap is None or not waits or event.finish is not None:
            return False
        try:
            return self._tap(event)
        except Exception as error:  # noqa: BLE001 - the owner's code; the owner hears of it where it reads
            self._tap = None
            self._error = error
            self._wake()
            return True

    def _wake(self) -> None:
        if self._ended:
            # Whoever keeps an answer must not keep the engine.
            self._on_abort = _nothing
            self._tap = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _nothing() -> None:
    """What an ended request has to tell the engine."""
