"""From an event loop to a model's threads and back, with as few changes of threads as there can be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from tengserve_backend.python_backend.gathering import GATHER_S, SOON_S, Gathering
from tengserve_backend.python_backend.ticket import Ticket

PATIENCE_S = 0.0005
"""So long an event loop stands still at most, and only while the model's answers are there by then."""

MAX_PAUSE = 4096
"""Times that a model is not waited for which was slow time and again."""


class Relay:
    """Hands over requests, those that come together all at once, and waits for a model that answers there and then.

    To most small models a change of threads is dearer than the model. An event loop that goes on meanwhile pays more:
    it and the model's thread take the interpreter's lock from each other, and the answer wakes the loop once more. So
    the loop stands still while a quick model runs. A model that is not quick is found out by one wait of PATIENCE_S,
    and tried again after 1, 3, 7, ... times without.

    Belongs to one event loop; `answered` may be called from any thread.

    Args:
        loop: the event loop.
        wake: tells the model's threads that so many requests wait for them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[int], None]) -> None:
        self.loop = loop
        self._wake = wake
        self._waiters: list[asyncio.Future[None]] = []
        self._gathering = Gathering()
        self._timer: asyncio.TimerHandle | None = None
        self._pause = self._paused = 0
        self._handed_over = 0.0
        self._lock = threading.Lock()
        # Handed over and not answered.
        self._pending: set[Ticket] = set()
        self._waiting = False
        # Held, but for the moment between the last answer and the loop's going on.
        self._door = threading.Lock()
        self._door.acquire()

    def hand_over(self, ticket: Ticket) -> asyncio.Future[None] | None:
        """See to it that a request is taken from its queue.

        Args:
            ticket: in the queue, of whose threads none was woken.

        Returns:
            None when it has its answer, or it takes longer; else what to wait for until one of these is so.
        """
        ticket.relay = self
        with self._lock:
            if ticket.answered:
                return None
            self._pending.add(ticket)
        if not self._waiters:
            # A model that is slow gains nothing by waiting.
            soon = time.monotonic() - self._handed_over < SOON_S
            if not self._pause:
                self._gathering.begin(soon=soon)
            if self._pause or self._gathering.limit == 1:
                self._hand_over(1)
                return None
            self._timer = self.loop.call_later(GATHER_S, self._group)
        else:
            self._gathering.came()
            if len(self._waiters) + 1 >= self._gathering.limit:
                self._group(ticket)
                return None
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def forget(self, ticket: Ticket) -> None:
        """Nobody waits for a request any more."""
        with self._lock:
            self._pending.discard(ticket)

    def answered(self, ticket: Ticket) -> None:
        """A request has an answer."""
        with self._lock:
            self._pending.discard(ticket)
            if self._pending or not self._waiting:
                return
            self._waiting = False
        self._door.release()

    def _group(self, last: Ticket | None = None) -> None:
        """Hand over those that wait; with the last one that was expected, or without when it has not come in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiters, self._waiters = self._waiters, []
        count = len(waiters) + (last is not None)
        self._gathering.end(count, complete=last is not None)
        self._hand_over(count)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _hand_over(self, count: int) -> None:
        self._wake(count)
        if self._paused < self._pause:
            self._paused += 1
            with self._lock:
                self._pending.clear()
        elif self._answered_at_once():
            self._pause = 0
        elif count > 1:
            self._gathering.too_many(count)
        else:
            self._pause, self._paused = min(2 * self._pause + 1, MAX_PAUSE), 0
        self._handed_over = time.monotonic()

    def _answered_at_once(self) -> bool:
        with self._lock:
            self._waiting = waiting = bool(self._pending)
        if not waiting or self._door.acquire(timeout=PATIENCE_S):
            return True
        with self._lock:
            answered = not self._waiting
            self._waiting = False
            self._pending.clear()
        if answered:
            # Just now: whoever did it opens the door.
            self._door.acquire()
        return False
