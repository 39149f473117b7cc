"""A condition variable for threads that wait for requests: woken without a fight for the interpreter."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from types import TracebackType


class _Bell:
    """A pipe that one thread sleeps at; closed when nobody holds it, so that no one writes to what it has become."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def ring(self) -> None:
        os.write(self._write, b"\0")

    def sleep(self, timeout_s: float | None) -> bool:
        """Sleep until it rings; False when the time is up."""
        if timeout_s is not None:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            # Rounded up: to wake before the time is to wake twice.
            if not poll.poll(int(timeout_s * 1000) + 1):
                return False
        os.read(self._read, 1)
        return True

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Changed:
    """What threading.Condition does, for one lock of its own.

    A thread that a lock wakes may run at once, in place of the one that woke it, only to wait for the interpreter which
    that one still holds; a small request waits longer for this than for anything else. Here a thread sleeps in `read`,
    and the `write` that wakes it is made without this lock and without the interpreter's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asleep: list[_Bell] = []
        self._woken: list[_Bell] = []
        self._spare: list[_Bell] = []
        self._soon: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def notify_all(self) -> None:
        """Wake every thread in `wait`, once the lock is released."""
        self._woken += self._asleep
        self._asleep = []

    def notify_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """As `notify_all`, when what the loop has at hand is done: requests that come together wake a thread once.

        Args:
            loop: the one that runs this.
        """
        if self._asleep and self._soon is not loop:
            self._soon = loop
            loop.call_soon(self._notify)

    def _notify(self) -> None:
        with self:
            self._soon = None
            self.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Release the lock, sleep until `notify_all` or until the time is up, and take the lock again."""
        bell = self._spare.pop() if self._spare else _Bell()
        self._asleep.append(bell)
        self._release()
        rang = False
        try:
            rang = bell.sleep(timeout_s)
        finally:
            self._lock.acquire()
        if bell in self._asleep:
            self._asleep.remove(bell)
        elif not rang:
            return  # It is about to ring, for nobody.
        self._spare.append(bell)

    def _release(self) -> None:
        woken, self._woken = self._woken, []
        self._lock.release()
        for bell in woken:
            bell.ring()
