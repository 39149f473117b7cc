"""Requests of a model that takes them one by one, in the order in which they came."""

from __future__ import annotations

import collections
import os
import threading
import time
import weakref

from tengserve_backend.errors import OverloadedError, ShuttingDownError
from tengserve_backend.python_backend.checks import request_label
from tengserve_backend.python_backend.request_queue import MAX_QUEUED_REQUESTS, QUEUE_FULL, RETRY_AFTER_S
from tengserve_backend.python_backend.ticket import Ticket


class PlainQueue:
    """See Waiting.

    An instance sleeps in a read from a pipe. Whoever writes to it lets go of the interpreter's lock for that time, so
    that the instance finds the lock free when it wakes; with a lock of Python's or a condition it would wake, find the
    interpreter's lock taken, and sleep once more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._closed = False
        # Instances that sleep and have not been told to wake: for each of the others there is one byte in the pipe.
        self._asleep = 0
        self._bell, self._rope = os.pipe()
        # Not before nobody has the queue: an instance that hangs in its own code may come back long after `close`.
        weakref.finalize(self, _close, self._bell, self._rope).atexit = False

    def put(self, ticket: Ticket) -> float | None:
        """See Waiting. An instance that sleeps goes on sleeping: `wake` has to follow."""
        with self._lock:
            if self._closed:
                raise ShuttingDownError("The model is being unloaded.")
            if len(self._waiting) >= MAX_QUEUED_REQUESTS:
                raise OverloadedError(
                    request_label(ticket.request.request_id) + QUEUE_FULL, retry_after_s=RETRY_AFTER_S
                )
            ticket.times.enqueued = time.monotonic_ns()
            self._waiting.append(ticket)
        return None

    def wake(self, count: int) -> None:
        """Wake so many instances, if there are as many that sleep."""
        with self._lock:
            count = min(count, self._asleep)
            self._asleep -= count
        if count:
            os.write(self._rope, bytes(count))

    def bounds_timeout(self, ticket: Ticket) -> bool:
        """See Waiting."""
        return False

    def expire(self, ticket: Ticket) -> None:
        """See Waiting. No request waits too long here."""

    def remove(self, ticket: Ticket) -> bool:
        """See Waiting."""
        with self._lock:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            return True

    def take(self, instance: int) -> list[Ticket] | None:
        """See Waiting."""
        while True:
            with self._lock:
                if self._closed:
                    return None
                if self._waiting:
                    ticket = self._waiting.popleft()
                    break
                self._asleep += 1
            os.read(self._bell, 1)
        ticket.times.taken = time.monotonic_ns()
        return [ticket]

    def close(self) -> None:
        """See Waiting."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            asleep = self._asleep
        self.wake(asleep)

    def __len__(self) -> int:
        return len(self._waiting)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
