"""An event loop whose time is virtual: it never waits, and a timer's turn comes at exactly its time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and no timer will ever wake anybody")
        self._advance(max(0.0, timeout))
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits for timers and tasks only, not for sockets or threads."""

    def __init__(self) -> None:
        self._virtual = 1000.0
        super().__init__(_Selector(self._advance))

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual

    def _advance(self, seconds: float) -> None:
        self._virtual += seconds


def run(main: Callable[[Callable[[], float]], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine that gets the clock; its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))
