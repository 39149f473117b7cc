"""Requests of sequences: Triton's sequence batcher.

A sequence has a slot of one instance from its first request on, and gives it back with the request that has END, or
when it sends nothing for too long. While all slots are taken new sequences wait, in the order in which they came. A
request is taken only after those of its sequence that came before it, and never in one batch with them.
"""

from __future__ import annotations

import collections
import heapq
import logging
import threading
import time
from dataclasses import dataclass, field

from tengserve_backend.errors import InvalidRequestError, OverloadedError, RequestAbortedError, ShuttingDownError, shown
from tengserve_backend.python_backend.batches import BatchPlanner
from tengserve_backend.python_backend.checks import request_label
from tengserve_backend.python_backend.config import PythonConfig
from tengserve_backend.python_backend.request_queue import (
    LONGEST_WAIT_S,
    MAX_QUEUED_REQUESTS,
    QUEUE_FULL,
    RETRY_AFTER_S,
)
from tengserve_backend.python_backend.sequence_batching import SequenceBatching, Strategy
from tengserve_backend.python_backend.ticket import Ticket

_LEAST_WAIT_S = 0.001
"""Between looks for a sequence that is idle, however short config.pbtxt makes that."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence, also after its END has come, until that is taken.

    Attributes:
        key: its correlation ID.
        waiting: its requests that no instance has.
        ends: its END has come.
        slot: that it has; None while all are taken.
        last: its last request so far.
        used_ns: when it was last heard of, in nanoseconds of the monotonic clock.
    """

    key: int | str
    last: Ticket
    used_ns: int
    waiting: collections.deque[Ticket] = field(default_factory=collections.deque)
    ends: bool = False
    slot: _Slot | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    """Room for one sequence of an instance; `row` is its place in a batch of the strategy direct."""

    row: int
    instance: int
    sequence: _Sequence | None = None

    def __lt__(self, other: _Slot) -> bool:
        # As in Triton: a sequence goes to the lowest row, which spreads them over the instances.
        return (self.row, self.instance) < (other.row, other.instance)

    def head(self) -> Ticket | None:
        """The next request."""
        return self.sequence.waiting[0] if self.sequence is not None and self.sequence.waiting else None


class SequenceQueue:
    """See request_queue.Waiting.

    Args:
        model: its name, for errors.
        config: of the model.
        sequences: its sequence batching.
    """

    def __init__(self, model: str, config: PythonConfig, sequences: SequenceBatching) -> None:
        self._model = model
        self._config = sequences
        self._idle_ns = sequences.idle_us * 1000
        self._planner = BatchPlanner(sequences.batching, config.max_batch_size, config.ragged)
        instances = sum(group.count for group in config.instances)
        self._slots = [[_Slot(row, number) for row in range(sequences.slots)] for number in range(instances)]
        self._free = [slot for slots in self._slots for slot in slots]
        heapq.heapify(self._free)
        self._open: dict[int | str, _Sequence] = {}
        """Those that take further requests."""
        self._placed: set[_Sequence] = set()
        """Those that have a slot."""
        self._backlog: collections.deque[_Sequence] = collections.deque()
        """Those that wait for one."""
        self._waiting: dict[Ticket, _Sequence] = {}
        self._look_ns = 0
        """No sequence has been idle for too long before then."""
        self._changed = threading.Condition()
        self._closed = False

    def put(self, ticket: Ticket) -> float | None:
        """See Waiting."""
        self._check(ticket)
        ticket.signature = self._planner.signature(ticket)
        now = ticket.times.enqueued = time.monotonic_ns()
        flags = ticket.request.sequence
        with self._changed:
            if self._closed:
                raise ShuttingDownError("The model is being unloaded.")
            self._end_idle(now)
            sequence = self._open.get(flags.correlation_id)
            if sequence is None and not flags.start:
                raise self._refusal(
                    ticket,
                    f"inference request for sequence {shown(str(flags.correlation_id))} to model '{self._model}' must "
                    f"specify the START flag on the first request of the sequence",
                    "sequence_start",
                )
            if len(self._waiting) >= MAX_QUEUED_REQUESTS:
                raise OverloadedError(
                    request_label(ticket.request.request_id) + QUEUE_FULL, retry_after_s=RETRY_AFTER_S
                )
            if sequence is None:
                sequence = _Sequence(flags.correlation_id, ticket, now)
                self._open[sequence.key] = sequence
                self._backlog.append(sequence)
            elif flags.start:
                _log.warning(
                    "model %s: sequence %s starts anew without having ended", self._model, shown(str(sequence.key))
                )
            sequence.last, sequence.used_ns = ticket, now
            sequence.waiting.append(ticket)
            self._waiting[ticket] = sequence
            if flags.end:
                sequence.ends = True
                del self._open[sequence.key]
            self._place(now)
            self._changed.notify_all()
        return None

    def bounds_timeout(self, ticket: Ticket) -> bool:
        """See Waiting. A sequence batcher has no queue policy."""
        return False

    def expire(self, ticket: Ticket) -> None:
        """See Waiting. `put` asks for it never."""

    def remove(self, ticket: Ticket) -> bool:
        """See Waiting. What a model would make of a sequence with a gap nobody knows, so its end is the sequence's."""
        with self._changed:
            sequence = self._waiting.pop(ticket, None)
            if sequence is None:
                return False
            sequence.waiting.remove(ticket)
            others = list(sequence.waiting)
            sequence.waiting.clear()
            for other in others:
                del self._waiting[other]
            if self._open.get(sequence.key) is sequence:
                del self._open[sequence.key]
            if sequence.slot is None:
                self._backlog.remove(sequence)
            self._release(sequence)
            self._changed.notify_all()
        for other in others:
            other.fail(
                RequestAbortedError(
                    request_label(other.request.request_id)
                    + "a request of its sequence was cancelled before it ran, which ends the sequence"
                )
            )
        return True

    def take(self, instance: int) -> list[Ticket] | None:
        """See Waiting."""
        with self._changed:
            while not self._closed:
                now = time.monotonic_ns()
                self._end_idle(now)
                batch, wait_s = self._plan(self._slots[instance], now)
                if batch and wait_s is None:
                    return self._taken(batch, now)
                if self._backlog:
                    # They wait for the next that is idle for too long.
                    idle_s = max(_LEAST_WAIT_S, (self._look_ns - now) / 1e9)
                    wait_s = idle_s if wait_s is None else min(wait_s, idle_s)
                # Woken by every change; `close` ends the wait.
                self._changed.wait(LONGEST_WAIT_S if wait_s is None else min(wait_s, LONGEST_WAIT_S))
            return None

    def close(self) -> None:
        """See Waiting."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def _check(self, ticket: Ticket) -> None:
        if not ticket.request.sequence.correlation_id:
            raise self._refusal(
                ticket,
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID",
                "sequence_id",
            )
        if ticket.batch > 1:
            raise self._refusal(
                ticket,
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher",
            )

    @staticmethod
    def _refusal(ticket: Ticket, text: str, field: str | None = None) -> InvalidRequestError:
        return InvalidRequestError(request_label(ticket.request.request_id) + text, field=field)

    # Under the lock.

    def _plan(self, slots: list[_Slot], now: int) -> tuple[list[Ticket | None], float | None]:
        """The batch that could go now, None in a row that is empty, and how many seconds it should still wait."""
        ready = [(slot, ticket) for slot in slots if (ticket := slot.head()) is not None]
        if not ready:
            return [], None
        if self._config.strategy is Strategy.OLDEST:
            oldest_first = sorted((ticket for _, ticket in ready), key=lambda ticket: ticket.times.enqueued)
            planned, wait_s = self._planner.plan(oldest_first)
            return list(planned), wait_s
        waited_ns = now - min(ticket.times.enqueued for _, ticket in ready)
        if len(ready) / len(slots) < self._config.min_utilization and waited_ns < self._config.max_delay_ns:
            return [ticket for _, ticket in ready], (self._config.max_delay_ns - waited_ns) / 1e9
        signature = ready[0][1].signature
        rows: list[Ticket | None] = [None] * (ready[-1][0].row + 1)
        for slot, ticket in ready:
            if ticket.signature == signature:
                rows[slot.row] = ticket
        return rows, None

    def _taken(self, batch: list[Ticket | None], now: int) -> list[Ticket]:
        template = next(ticket for ticket in batch if ticket is not None)
        # One for all empty rows: a large request would else be there once for each of them.
        filler = self._config.filler(template.request) if None in batch else template.request
        taken = []
        for ticket in batch:
            if ticket is None:
                taken.append(template.filler(filler))
                continue
            ticket.times.taken = now
            taken.append(ticket)
            sequence = self._waiting.pop(ticket)
            sequence.waiting.popleft()
            if sequence.ends and not sequence.waiting:
                self._release(sequence)
        return taken

    def _release(self, sequence: _Sequence) -> None:
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            slot.sequence = None
            self._placed.remove(sequence)
            heapq.heappush(self._free, slot)
            self._place(time.monotonic_ns())

    def _place(self, now: int) -> None:
        """Give free slots to sequences that wait for one."""
        while self._backlog and self._free:
            sequence, slot = self._backlog.popleft(), heapq.heappop(self._free)
            sequence.slot, slot.sequence, sequence.used_ns = slot, sequence, now
            self._placed.add(sequence)
            self._look_ns = min(self._look_ns, now + self._idle_ns)
            self._changed.notify_all()

    def _end_idle(self, now: int) -> None:
        if now < self._look_ns:
            return
        self._look_ns = now + self._idle_ns
        for sequence in list(self._placed):
            if sequence.waiting or not sequence.last.ended:
                continue  # It is the model that takes its time.
            ends_ns = max(sequence.used_ns, sequence.last.times.returned) + self._idle_ns
            if ends_ns > now:
                self._look_ns = min(self._look_ns, ends_ns)
                continue
            if self._open.get(sequence.key) is sequence:
                del self._open[sequence.key]
            self._release(sequence)
