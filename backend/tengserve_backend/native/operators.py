"""The one module that names our C++ operators, once `load.cpu_library` has given them.

Each checks its arguments itself, and says in a sentence what is wrong with them.
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators

DTYPES = (torch.float32, torch.bfloat16)
"""What they compute in."""

BLOCK_SIZE = 16
"""Tokens of a cache block: as many as the widest registers hold."""


def fused_operators() -> FusedOperators:
    """Those that take the place of a model's parts."""
    operators = torch.ops.tengserve_cpu
    return FusedOperators(
        is_fault=lambda _: False,
        rms_norm=operators.rms_norm.default,
        rotary=operators.rotary.default,
        swiglu=operators.silu_mul.default,
        packed_linear=PackedLinearOperators(operators.pack_linear.default, operators.linear.default),
    )
