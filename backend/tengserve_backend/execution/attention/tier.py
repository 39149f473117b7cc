"""What every attention tier is: a way to attend over pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import Span


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of one attention call, as transformers passes it.

    Attributes:
        scaling: factor of the scores; always given by the model, never derived from the head size.
        window: a query sees this many keys, itself included; None sees all before it.
        chunk: a query sees keys of its own chunk of this many positions only; None has no chunks.
        softcap: scores are softcap * tanh(score / softcap); None leaves them.
        sinks: [query heads]; one more score a head in the softmax that no value belongs to; None has none.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionTier(Protocol):
    """One way to attend. The block size belongs to it, for its kernels read the pages."""

    @property
    def name(self) -> str:
        """For the log and the metadata."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    def attend(
        self, query: torch.Tensor, pages: LayerCache, spans: tuple[Span, ...], spec: AttentionSpec
    ) -> torch.Tensor:
        """Causal attention of packed queries over their own sequences' pages.

        Args:
            query: [query heads, T, key_dim].
            pages: the layer's cache, the new tokens' keys and values included.
            spans: the sequences of the row, in order.
            spec: the model's wishes.

        Returns:
            [T, query heads, value_dim].
        """
        ...
