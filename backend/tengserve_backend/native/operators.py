"""The one module that names our C++ operators, once `load.cpu_library` has given them.

Each checks its arguments itself, and says in a sentence what is wrong with them.
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.fusion.operators import DecoderOperators, FusedOperators, PackedLinearOperators

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


def fused_operators(attention: AttentionTier) -> FusedOperators:
    """Those that take the place of a model's parts.

    Args:
        attention: the tier of these operators.
    """
    operators = torch.ops.tengserve_cpu
    return FusedOperators(
        is_fault=lambda _: False,
        rms_norm=operators.rms_norm.default,
        rotary=operators.rotary.default,
        swiglu=operators.silu_mul.default,
        packed_rows=packed_rows,
        packed_linear=PackedLinearOperators(operators.pack_linear.default, operators.linear.default),
        decoder=DecoderOperators(attention, torch.classes.tengserve_cpu.Decoder),
    )
