"""Parts of a loaded model replaced by fused operators: one registry, each fusion proven on the model's own parts.

A fusion looks for parts that it knows the shape of, gives each random input and compares the answers. A part that does
not agree is left to transformers: a norm that adds one to its weight looks like one that does not, and only its answer
tells.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion.agreement import Left
from tengserve_backend.devices.npu.fusion.gated_mlp import fuse_gated_mlps
from tengserve_backend.devices.npu.fusion.rms_norm import fuse_rms_norms
from tengserve_backend.devices.npu.fusion.rotary import fuse_rotary
from tengserve_backend.devices.npu.operators import Capabilities, Operator

_log = logging.getLogger(__name__)

_ATLAS = frozenset({NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3})


@dataclass(frozen=True, slots=True)
class _Fusion:
    """One kind of replacement.

    Attributes:
        operator: that does the work.
        families: chips that are known to have it.
        apply: replaces what it can, in place. Gives how many parts it replaced, and what it tried and left.
    """

    operator: Operator
    families: frozenset[NpuFamily]
    apply: Callable[[torch.nn.Module], tuple[int, list[Left]]]


FUSIONS: Mapping[str, _Fusion] = {
    "rms_norm": _Fusion(Operator.RMS_NORM, _ATLAS | {NpuFamily.ASCEND_310P, NpuFamily.ASCEND_910}, fuse_rms_norms),
    # Other chips have it only with operators compiled for each shape, which is off.
    "rotary": _Fusion(Operator.ROTARY, _ATLAS, fuse_rotary),
    # Documented for Atlas A2; used on the other two by vllm-ascend.
    "swiglu": _Fusion(Operator.SWIGLU, _ATLAS | {NpuFamily.ASCEND_310P}, fuse_gated_mlps),
}
"""By the name in the setting npuFusions."""


def fuse(model: torch.nn.Module, *, wanted: Collection[str], family: NpuFamily, found: Capabilities) -> list[str]:
    """Replace parts of a model, in place; what was tried and left goes to the log.

    Args:
        model: loaded, on its device, in evaluation mode.
        wanted: keys of `FUSIONS`.
        family: of the chip.
        found: operators of the installed torch-npu.

    Returns:
        What was replaced, for the log: "rms_norm (65)".
    """
    done: list[str] = []
    for name, fusion in FUSIONS.items():
        if name not in wanted:
            continue
        if family not in fusion.families:
            _log.info("%s is left to transformers: %s is not known to have it", name, family.value)
        elif fusion.operator not in found.available:
            _log.info("%s is left to transformers: %s", name, found.missing[fusion.operator])
        else:
            count, left = fusion.apply(model)
            if count:
                done.append(f"{name} ({count})")
            for (what, reason), times in Counter(left).items():
                _log.info("%s is left to transformers in %d of %s: %s", name, times, what, reason)
    return done
