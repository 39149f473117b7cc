"""How a step becomes logits: packed over pages for most models, one sequence at a time for the others."""

from __future__ import annotations

from typing import Protocol

import torch

from tengserve_backend.scheduling.step import Step


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

    def run(self, step: Step) -> torch.Tensor:
        """Compute a step.

        Running a part again, unchanged, gives the same result and leaves the same memory.

        Returns:
            [R, vocabulary]: the last token's logits of each part that samples, in the step's order.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Forget what is remembered of a sequence besides its blocks."""
        ...

    def probe(self) -> None:
        """Run the model on one token that belongs to no request; raises what the model raises."""
        ...
