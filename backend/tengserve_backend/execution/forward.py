"""How a step becomes logits: packed over pages for most models, one sequence at a time for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

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

    def run(self, step: Step) -> StepLogits:
        """Compute a step. Running a part again, unchanged, gives the same result and leaves the same memory."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget what is remembered of a sequence besides its blocks."""
        ...

    def probe(self) -> None:
        """Run the model on one token that belongs to no request; raises what the model raises."""
        ...
