"""What one step of the model is to compute: plain data, made by the scheduler and read by the runner."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part in a step.

    Attributes:
        seq_id: which sequence.
        start: position of the first token of this part; the tokens before it are in the cache.
        token_ids: the tokens to compute, at positions start, start + 1, ...
        blocks: cache blocks that cover positions 0 .. start + len(token_ids) - 1.
        samples: the last token is the last one known, so the step chooses the next one.
        scores_prompt: the logits of all these tokens are wanted, for they say how probable the prompt is.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    samples: bool
    scores_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the model over the parts of several sequences, packed.

    Attributes:
        number: counts from 0.
        sequences: each sequence at most once.
        preempted: sequences that have lost their blocks since the step before.
    """

    number: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(part.token_ids) for part in self.sequences)

    def without(self, seq_ids: Collection[int]) -> Step:
        """The same step less some sequences; it may be empty."""
        kept = tuple(part for part in self.sequences if part.seq_id not in seq_ids)
        return Step(self.number, kept, self.preempted)

    def apart(self) -> Iterator[Step]:
        """Each part as a step of its own."""
        for part in self.sequences:
            yield Step(self.number, (part,), self.preempted)
