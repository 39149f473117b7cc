"""Blocking calls that may take minutes, each in a thread of its own: they would keep short work out of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from tengserve_backend.errors import OverloadedError

MAX_RUNNING: Final = 16
"""Of one kind at once."""

_RETRY_AFTER_S: Final = 5

_T = TypeVar("_T")


class Threads:
    """Threads of one kind of call, for one event loop. They are daemons: they end with the process at the latest.

    Args:
        kind: what the calls do to the model repository, for the error that says that there are too many.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._running = 0

    async def run(self, call: Callable[[], _T]) -> _T:
        """The call's result. It goes on without its caller when that is cancelled.

        Raises:
            OverloadedError: too many run.
        """
        if self._running >= MAX_RUNNING:
            raise OverloadedError(f"Too many {self._kind} the model repository at once.", retry_after_s=_RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()

        def end(set_outcome: Callable[[], None]) -> None:
            self._running -= 1
            if not result.cancelled():
                set_outcome()

        def work() -> None:
            try:
                value = call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
                failure = error
                outcome = lambda: result.set_exception(failure)  # noqa: E731 - one of two outcomes
            else:
                outcome = lambda: result.set_result(value)  # noqa: E731 - the other one
            # The loop is closed when the process does not wait for this thread any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end, outcome)

        self._running += 1
        threading.Thread(target=work, name=f"{self._kind} the repository", daemon=True).start()
        return await result
