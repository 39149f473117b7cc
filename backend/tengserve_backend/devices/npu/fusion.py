"""Which fused operators an NPU has for parts of a model; `execution.fusion` puts them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.errors import is_fault
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.operators import Capabilities, Operator
from tengserve_backend.execution import fusion
from tengserve_backend.execution.fusion.operators import FusedOperators

_log = logging.getLogger(__name__)

_ATLAS = frozenset({NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3})


@dataclass(frozen=True, slots=True)
class _Fusion:
    """One kind of replacement.

    Attributes:
        operator: that does the work.
        families: chips that are known to have it.
        call: how to compute with it, as in FusedOperators.
    """

    operator: Operator
    families: frozenset[NpuFamily]
    call: Callable[..., Any]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return operators.rms_norm(x, weight, epsilon=epsilon)


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator for queries, and again for keys.

    Models get q and k by transposing [batch, T, heads, dim], which is also how attention wants them: that way round
    nothing is copied.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned_q, turned_k = (operators.rotary(x.transpose(1, 2).contiguous(), cos, sin).transpose(1, 2) for x in (q, k))
    return turned_q, turned_k


FUSIONS: Mapping[str, _Fusion] = {
    "rms_norm": _Fusion(Operator.RMS_NORM, _ATLAS | {NpuFamily.ASCEND_310P, NpuFamily.ASCEND_910}, _rms_norm),
    # Other chips have it only with operators compiled for each shape, which is off.
    "rotary": _Fusion(Operator.ROTARY, _ATLAS, _rotary),
    # Documented for Atlas A2; used on the other two by vllm-ascend.
    "swiglu": _Fusion(Operator.SWIGLU, _ATLAS | {NpuFamily.ASCEND_310P}, operators.swiglu),
}
"""By the name in the setting npuFusions, which is also the one in FusedOperators."""


def fuse(model: torch.nn.Module, *, wanted: Collection[str], family: NpuFamily, found: Capabilities) -> dict[str, int]:
    """Replace parts of a model, in place; what stays, and why, goes to the log.

    Args:
        model: loaded, on its device, in evaluation mode.
        wanted: keys of `FUSIONS`.
        family: of the chip.
        found: operators of the installed torch-npu.

    Returns:
        How many parts each fusion replaced, by its name.
    """
    calls: dict[str, Any] = {}
    for name, row in FUSIONS.items():
        if name not in wanted:
            continue
        if family not in row.families:
            _log.info("%s is left to transformers: %s is not known to have it", name, family.value)
        elif row.operator not in found.available:
            _log.info("%s is left to transformers: %s", name, found.missing[row.operator])
        else:
            calls[name] = row.call
    return fusion.fuse(model, FusedOperators(is_fault, **calls))
