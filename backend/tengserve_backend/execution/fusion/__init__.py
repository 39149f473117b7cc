"""Parts of a loaded model replaced by a device's fused operators, each proven on the model's own parts.

A fusion looks for parts that it knows the shape of, gives each random input and compares the answers. A part that does
not agree is left to transformers: a norm that adds one to its weight looks like one that does not, and only its answer
tells.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping

import torch

from tengserve_backend.execution.fusion.agreement import Left
from tengserve_backend.execution.fusion.gated_mlp import fuse_gated_mlps
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.rms_norm import fuse_rms_norms
from tengserve_backend.execution.fusion.rotary import fuse_rotary

_log = logging.getLogger(__name__)

_Fusion = Callable[[torch.nn.Module, FusedOperators], Iterator[Left | None]]

_FUSIONS: Mapping[str, _Fusion] = {
    "rms_norm": fuse_rms_norms,
    "rotary": fuse_rotary,
    "swiglu": fuse_gated_mlps,
}


def fuse(model: torch.nn.Module, operators: FusedOperators) -> list[str]:
    """Replace parts of a model, in place; what was tried and left goes to the log.

    Args:
        model: loaded, on its device, in evaluation mode.
        operators: of the device; what is None stays as it is.

    Returns:
        What was replaced, for the log: "rms_norm (65)".
    """
    pieces = fuse_in_pieces(model, operators)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            done: list[str] = end.value
            return done


def fuse_in_pieces(model: torch.nn.Module, operators: FusedOperators) -> Generator[None, None, list[str]]:
    """The same, a part at a time: the model can run whenever this has yielded."""
    done: list[str] = []
    for name, fusion in _FUSIONS.items():
        count = 0
        left: Counter[Left] = Counter()
        for outcome in fusion(model, operators):
            if outcome is None:
                count += 1
            else:
                left[outcome] += 1
            yield
        if count:
            done.append(f"{name} ({count})")
        for (what, reason), times in left.items():
            _log.info("%s is left to transformers in %d of %s: %s", name, times, what, reason)
    return done
