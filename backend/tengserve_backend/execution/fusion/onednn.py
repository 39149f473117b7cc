"""Linear layers over weights that oneDNN has packed: for CPUs without our own operators, with what torch brings.

A plain linear layer is slow where it has few rows, as a step of decodes has: oneDNN, and MKL for float32, read a weight
that is not packed for them at a fraction of the memory's speed.
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators


def onednn_operators() -> FusedOperators:
    """What takes the place of a model's parts; nothing where torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return FusedOperators(is_fault=_never)
    return FusedOperators(is_fault=_never, packed_linear=PackedLinearOperators(_pack, _linear))


def _never(_: BaseException) -> bool:
    return False


def _pack(weight: torch.Tensor) -> torch.Tensor:
    # An opaque tensor of oneDNN's, in the layout that it likes for any number of rows.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def _linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, in_features: int, out_features: int
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result
