"""The waiting sequences in order of service."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from tengserve_backend.scheduling.sequence import Sequence


class WaitingQueue:
    """By priority, then first come first served. Admission bounds its length, so a sorted list is the right tool."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of service."""
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Add; a preempted sequence kept its arrival, so it comes back to its old place."""
        bisect.insort(self._sequences, sequence, key=lambda member: member.rank)

    def peek(self) -> Sequence | None:
        """The next one, left in place."""
        return self._sequences[0] if self._sequences else None

    def remove(self, sequence: Sequence) -> None:
        """Take a member out, wherever it is.

        Raises:
            ValueError: it is not waiting.
        """
        self._sequences.remove(sequence)
