"""What a device offers to compute parts of a model with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.fusion.quantized import QuantizedWeight

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""x [..., size], weight [size] and epsilon to x / sqrt(mean(x ** 2) + epsilon) * weight."""

Rotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Query and key [batch, heads, T, dim], cos and sin [1 or batch, T, dim] to both, turned by halves."""

Swiglu = Callable[[torch.Tensor], torch.Tensor]
"""[..., 2 * size], the gate first, to silu(gate) * up: [..., size]."""

PackedRows = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A weight as packed_linear packs it, row numbers [...] and in features to these rows: [..., in]."""


@dataclass(frozen=True, slots=True)
class PackedLinearOperators:
    """A linear layer whose weight is kept in an order of its own.

    Attributes:
        pack: a weight [out, in], as `quantize` leaves it, in that order.
        linear: x [..., in], the packed weight, the bias or None, in and out features to [..., out].
        dtypes: of x.
        quantize: what becomes of a weight before; None leaves it as it is.
    """

    pack: Callable[[Any], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int], torch.Tensor]
    dtypes: Collection[torch.dtype] = (torch.float32, torch.bfloat16)
    quantize: Callable[[torch.Tensor], QuantizedWeight] | None = None


@dataclass(frozen=True, slots=True)
class DecoderOperators:
    """All layers of a decoder as one operator, over weights packed by PackedLinearOperators.

    Attributes:
        tier: whose pages it reads and writes; called layer by layer, the model attends by it.
        decoder: sizes to the operator, to which layers are to be added: hidden, query heads, key and value heads,
            elements of a key and of a value, of the MLP. Its `run` takes hidden [1, T, size], cos and sin
            [1, T, key], keys and values of all layers, slots, block table, query ends and contexts of a packed batch,
            and gives the last layer's [1, T, size].
    """

    tier: AttentionTier
    decoder: Callable[[int, int, int, int, int, int], Any]


@dataclass(frozen=True, slots=True)
class FusedOperators:
    """Operators that may take the place of parts of a model; None where the device has no such operator.

    Attributes:
        is_fault: whether an error says that the device is lost.
        rms_norm, rotary, swiglu, packed_linear, packed_rows, decoder: see the types.
        packed_head: of the layer that gives the logits; None where that is like the others.
    """

    is_fault: Callable[[BaseException], bool]
    rms_norm: RmsNorm | None = None
    rotary: Rotary | None = None
    swiglu: Swiglu | None = None
    packed_linear: PackedLinearOperators | None = None
    packed_head: PackedLinearOperators | None = None
    packed_rows: PackedRows | None = None
    decoder: DecoderOperators | None = None
