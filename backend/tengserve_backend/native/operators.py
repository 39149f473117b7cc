"""The one module that names our C++ operators, once `load.cpu_library` has given them.

Each checks its arguments itself, and says in a sentence what is wrong with them.
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.fusion.operators import DecoderOperators, FusedOperators, PackedLinearOperators
from tengserve_backend.execution.fusion.quantized import Int4Weight, Int8Weight, Quantization, to_int4, to_int8

DTYPES = (torch.float32, torch.bfloat16)
"""What they compute in."""

BLOCK_SIZE = 16
"""Tokens of a cache block: as many as the widest registers hold."""

_PANEL_COLUMNS = 32


def packed_rows(packed: torch.Tensor, ids: torch.Tensor, in_features: int) -> torch.Tensor:
    """Rows of the weight [out, in] that `pack_linear` has packed.

    Args:
        packed: panels of 32 rows, whose numbers lie side by side, in pairs in bfloat16 (decision 0006, layouts).
        ids: which rows, of any shape.
        in_features: of the weight; what pads them is left out.

    Returns:
        [..., in_features].
    """
    # Four bytes at once: a number, or two that are neighbours in their row.
    panels = packed.view(len(packed), -1, _PANEL_COLUMNS * 4 // packed.element_size()).view(torch.int32)
    flat = ids.reshape(-1)
    rows = panels[flat // _PANEL_COLUMNS, :, flat % _PANEL_COLUMNS].view(packed.dtype)
    return rows.reshape(*ids.shape, -1)[..., :in_features]


def first_maxima(x: torch.Tensor) -> torch.Tensor:
    """Where each row's first largest number is.

    Args:
        x: [R, size], of DTYPES.

    Returns:
        int64 [R]; -1 for a row whose largest is not finite, or that has a NaN.
    """
    found: torch.Tensor = torch.ops.tengserve_cpu.first_maxima.default(x)
    return found


_HEAD = {Quantization.INT4: Quantization.INT8}
"""In 4 bits the layer that gives the logits costs more quality than all others together; docs/cpu.md has figures."""


def fused_operators(attention: AttentionTier, quantization: Quantization = Quantization.NONE) -> FusedOperators:
    """Those that take the place of a model's parts.

    Args:
        attention: the tier of these operators.
        quantization: of linear layers.
    """
    operators = torch.ops.tengserve_cpu
    return FusedOperators(
        is_fault=lambda _: False,
        rms_norm=operators.rms_norm.default,
        rotary=operators.rotary.default,
        swiglu=operators.silu_mul.default,
        packed_linear=_packed_linear(quantization),
        packed_head=_packed_linear(_HEAD.get(quantization, quantization)),
        # An embedding keeps its own numbers.
        packed_rows=packed_rows if quantization is Quantization.NONE else None,
        decoder=DecoderOperators(attention, torch.classes.tengserve_cpu.Decoder),
    )


def _packed_linear(quantization: Quantization) -> PackedLinearOperators:
    operators = torch.ops.tengserve_cpu
    if quantization is Quantization.INT8:

        def pack_int8(weight: Int8Weight) -> torch.Tensor:
            packed: torch.Tensor = operators.pack_linear_int8(weight.integers, weight.scales)
            return packed

        return PackedLinearOperators(pack_int8, operators.linear_int8.default, quantize=to_int8)
    if quantization is Quantization.INT4:

        def pack_int4(weight: Int4Weight) -> torch.Tensor:
            packed: torch.Tensor = operators.pack_linear_int4(weight.integers, weight.scales, weight.minimums)
            return packed

        return PackedLinearOperators(pack_int4, operators.linear_int4.default, quantize=to_int4)
    return PackedLinearOperators(operators.pack_linear.default, operators.linear.default)
