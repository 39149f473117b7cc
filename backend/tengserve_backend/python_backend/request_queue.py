"""Requests that wait for an instance, and the batches that instances take: Triton's dynamic batcher and its policies.

Levels are served by priority, and within one those whose timeout has passed (with the action DELAY) come last. A batch
is taken from the front and never skips a request, so an odd shape ends a batch and starts the next.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tengserve_backend.errors import OverloadedError, ShuttingDownError
from tengserve_backend.python_backend.batches import BatchPlanner
from tengserve_backend.python_backend.batching import Batching, QueuePolicy, TimeoutAction
from tengserve_backend.python_backend.checks import request_label
from tengserve_backend.python_backend.config import PythonConfig
from tengserve_backend.python_backend.ticket import Ticket

MAX_QUEUED_REQUESTS = 10_000
"""Of one level, also where the policy sets no limit: what waits takes memory."""

LONGEST_WAIT_S = 3600.0
"""Of one wait. What config.pbtxt says may be longer than any clock of the system, and is waited for in parts."""

RETRY_AFTER_S = 1
QUEUE_FULL = "Exceeds maximum queue size"
TIMEOUT_EXPIRED = "Request timeout expired"
"""Triton's words, which clients compare."""


class Waiting(Protocol):
    """Where requests wait for an instance. Thread-safe. Ends with `close`."""

    def put(self, ticket: Ticket) -> float | None:
        """Let a request wait for an instance.

        Returns:
            Seconds after which `expire` must be called if it still waits; None when it may wait for ever.

        Raises:
            InvalidRequestError: it does not fit its sequence.
            OverloadedError: there is no room.
            ShuttingDownError: the queue is closed.
        """
        ...

    def bounds_timeout(self, ticket: Ticket) -> bool:
        """Whether the timeout of this request says how long it may wait here, and not how long its answer may take."""
        ...

    def expire(self, ticket: Ticket) -> None:
        """Apply the policy to a request that waited too long; nothing when an instance has it."""
        ...

    def remove(self, ticket: Ticket) -> bool:
        """Take a request out; False when an instance has it, or had it."""
        ...

    def take(self, instance: int) -> list[Ticket] | None:
        """The next batch for the instance of this number. Blocks until there is one; None once the queue is closed."""
        ...

    def close(self) -> None:
        """Take nothing more, forget what waits, and end every `take`."""
        ...

    def __len__(self) -> int:
        """Requests that wait."""
        ...


@dataclass(slots=True)
class _Level:
    policy: QueuePolicy
    waiting: collections.deque[Ticket] = field(default_factory=collections.deque)
    delayed: collections.deque[Ticket] = field(default_factory=collections.deque)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)

    def __iter__(self) -> Iterator[Ticket]:
        return itertools.chain(self.waiting, self.delayed) if self.delayed else iter(self.waiting)

    def remove(self, ticket: Ticket) -> bool:
        if self.waiting and self.waiting[0] is ticket:
            self.waiting.popleft()
            return True
        for line in (self.waiting, self.delayed):
            if ticket in line:
                line.remove(ticket)
                return True
        return False


class RequestQueue:
    """See Waiting. Every instance takes from the same lines.

    Args:
        config: of the model.
    """

    def __init__(self, config: PythonConfig) -> None:
        self._batching = config.batching
        self._planner = BatchPlanner(config.batching, config.max_batch_size, config.ragged)
        batching = config.batching or Batching()
        levels = range(1, batching.priority_levels + 1) if batching.priority_levels else (0,)
        self._levels = {level: _Level(batching.level_policies.get(level, batching.default_policy)) for level in levels}
        self._default_level = batching.default_level if batching.priority_levels else 0
        self._may_expire = False
        self._changed = threading.Condition()
        self._closed = False

    def put(self, ticket: Ticket) -> float | None:
        """See Waiting."""
        asked = ticket.request.priority
        ticket.level = asked if asked in self._levels and asked else self._default_level
        level = self._levels[ticket.level]
        policy = level.policy
        timeout_us = policy.default_timeout_us
        # As in Triton, a request can only shorten the policy's timeout.
        if policy.allow_timeout_override and 0 < ticket.request.timeout_us < timeout_us:
            timeout_us = ticket.request.timeout_us
        ticket.signature = self._planner.signature(ticket)
        ticket.times.enqueued = now = time.monotonic_ns()
        ticket.queue_deadline_ns = now + timeout_us * 1000 if timeout_us else 0
        with self._changed:
            if self._closed:
                raise ShuttingDownError("The model is being unloaded.")
            if len(level) >= (policy.max_queue_size or MAX_QUEUED_REQUESTS):
                raise OverloadedError(
                    request_label(ticket.request.request_id) + QUEUE_FULL, retry_after_s=RETRY_AFTER_S
                )
            level.waiting.append(ticket)
            self._may_expire = self._may_expire or timeout_us > 0
            self._changed.notify_all()
        return timeout_us / 1e6 if timeout_us else None

    def bounds_timeout(self, ticket: Ticket) -> bool:
        """See Waiting."""
        return self._batching is not None and self._levels[ticket.level].policy.allow_timeout_override

    def expire(self, ticket: Ticket) -> None:
        """See Waiting."""
        with self._changed:
            level = self._levels[ticket.level]
            if ticket not in level.waiting:
                return
            self._apply_timeout(level, ticket)

    def remove(self, ticket: Ticket) -> bool:
        """See Waiting."""
        with self._changed:
            return self._levels[ticket.level].remove(ticket)

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._levels.values()))

    def take(self, instance: int) -> list[Ticket] | None:
        """See Waiting."""
        with self._changed:
            while not self._closed:
                if self._may_expire:
                    self._apply_timeouts()
                batch, wait_s = self._planner.plan(itertools.chain.from_iterable(self._levels.values()))
                if batch and wait_s is None:
                    now = time.monotonic_ns()
                    for ticket in batch:
                        self._levels[ticket.level].remove(ticket)
                        ticket.times.taken = now
                    return batch
                # Woken by every change; `close` ends the wait.
                self._changed.wait(LONGEST_WAIT_S if wait_s is None else min(wait_s, LONGEST_WAIT_S))
            return None

    def close(self) -> None:
        """See Waiting."""
        with self._changed:
            self._closed = True
            for level in self._levels.values():
                level.waiting.clear()
                level.delayed.clear()
            self._changed.notify_all()

    # Under the lock.

    def _apply_timeouts(self) -> None:
        now = time.monotonic_ns()
        for level in self._levels.values():
            # Deadlines in a line are not in order: a request may shorten its own.
            for ticket in [one for one in level.waiting if one.queue_deadline_ns and now >= one.queue_deadline_ns]:
                self._apply_timeout(level, ticket)

    def _apply_timeout(self, level: _Level, ticket: Ticket) -> None:
        level.waiting.remove(ticket)
        if level.policy.timeout_action is TimeoutAction.DELAY:
            level.delayed.append(ticket)
            self._changed.notify_all()
        else:
            ticket.fail(OverloadedError(TIMEOUT_EXPIRED, retry_after_s=RETRY_AFTER_S))
