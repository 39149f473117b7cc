"""Which of the requests that wait make the next batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from tengserve_backend.python_backend.batching import Batching
from tengserve_backend.python_backend.ticket import Ticket


class BatchPlanner:
    """Triton's dynamic batcher, as rules about requests in the order in which they are to be served.

    Args:
        batching: None lets each request run alone.
        max_batch_size: of the model; 0 counts as 1.
        ragged: inputs whose shapes may differ within a batch.
    """

    def __init__(self, batching: Batching | None, max_batch_size: int, ragged: frozenset[str]) -> None:
        self._batching = batching
        self._max_batch_size = max(1, max_batch_size)
        self._ragged = ragged
        self._largest_preferred = max(
            batching.preferred_sizes if batching is not None else (), default=self._max_batch_size
        )

    def signature(self, ticket: Ticket) -> object:
        """What requests must have in common to share a batch: the inputs that they have, and their shapes."""
        if self._batching is None:
            return None
        return frozenset(
            (tensor.name, None if tensor.name in self._ragged else tensor.shape[1:]) for tensor in ticket.request.inputs
        )

    def plan(self, candidates: Iterable[Ticket]) -> tuple[list[Ticket], float | None]:
        """The batch that could go now, from the front, and how many seconds it should still wait for more.

        No candidate is skipped, so an odd shape ends a batch. None seconds is at once.
        """
        batching = self._batching
        if batching is None:
            return list(itertools.islice(candidates, 1)), None
        batch: list[Ticket] = []
        size, preferred, complete = 0, 0, False
        for ticket in candidates:
            if batch:
                grown = size + ticket.batch
                if grown > self._max_batch_size or ticket.signature != batch[0].signature:
                    complete = True
                    break
                if grown > self._largest_preferred and not preferred:
                    preferred = len(batch)
            batch.append(ticket)
            size += ticket.batch
            if size in batching.preferred_sizes:
                preferred = len(batch)
        if not batch:
            return [], None
        waited_ns = time.monotonic_ns() - min(ticket.times.enqueued for ticket in batch)
        waits = waited_ns < batching.max_delay_ns
        if preferred and (waits or batching.max_delay_ns == 0):
            return batch[:preferred], None
        if complete or size >= self._largest_preferred or not waits:
            return batch, None
        return batch, (batching.max_delay_ns - waited_ns) / 1e9
