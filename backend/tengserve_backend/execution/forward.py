"""How a step becomes logits: packed over pages for most models, one sequence at a time for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tengserve_backend.execution.snapshot import Snapshot, Upload, Uploaded
from tengserve_backend.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits of consecutive tokens of one sequence.

    Attributes:
        start: position of the first of these tokens.
        rows: [tokens, vocabulary].
    """

    start: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step of the model gives.

    Attributes:
        last: [R, vocabulary]: the last token's logits of each part that samples, in the step's order.
        prompts: by sequence, for parts that score their prompt. A forward that computes a whole prompt at its last
            chunk has nothing for the chunks before, and everything then.
    """

    last: torch.Tensor
    prompts: Mapping[int, PromptLogits]


Computation = Callable[[Uploaded], StepLogits]
"""A step that waits for its snapshot."""


class ModelForward(Protocol):
    """One model and what it remembers of the sequences. The engine's thread calls it, in inference mode."""

    @property
    def tier(self) -> str:
        """Name of the way, for the log and the metadata."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a cache block holds."""
        ...

    @property
    def logit_width(self) -> int:
        """Scores that the model gives a token, the vocabulary of StepLogits."""
        ...

    def prepare(self, step: Step, snapshot: Snapshot) -> Computation:
        """Add what a step reads to its snapshot, and return how to compute it once that is uploaded.

        Computing a part again, unchanged, gives the same result and leaves the same memory.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Forget what is remembered of a sequence besides its blocks."""
        ...

    def probe_step(self) -> Step:
        """A step of one token that belongs to no request. Its sequence is released afterwards."""
        ...


def compute(forward: ModelForward, step: Step, upload: Upload) -> StepLogits:
    """The logits of a step, with nothing else in its snapshot."""
    snapshot = Snapshot()
    computation = forward.prepare(step, snapshot)
    return computation(snapshot.upload(upload))
