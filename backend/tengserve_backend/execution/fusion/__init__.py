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

from tengserve_backend.execution.fusion.agreement import Left, Trial
from tengserve_backend.execution.fusion.conv1d import conv1ds_as_linears
from tengserve_backend.execution.fusion.decoder_stack import fuse_decoder_stacks
from tengserve_backend.execution.fusion.direct_forward import fuse_forward
from tengserve_backend.execution.fusion.embedding import share_embeddings
from tengserve_backend.execution.fusion.experts import experts_as_linears
from tengserve_backend.execution.fusion.gated_mlp import fuse_gated_mlps
from tengserve_backend.execution.fusion.linears import pack_linears
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.rms_norm import fuse_rms_norms
from tengserve_backend.execution.fusion.rotary import fuse_rotary

_log = logging.getLogger(__name__)

_Fusion = Callable[[torch.nn.Module, FusedOperators, Callable[[], object]], Iterator[Left | Trial | None]]

_FUSIONS: Mapping[str, _Fusion] = {
    "rms_norm": lambda model, operators, _: fuse_rms_norms(model, operators),
    "rotary": lambda model, operators, _: fuse_rotary(model, operators),
    "swiglu": lambda model, operators, _: fuse_gated_mlps(model, operators),
    "conv1d": lambda model, operators, _: conv1ds_as_linears(model, operators),
    "experts": lambda model, operators, _: experts_as_linears(model, operators),
    # After all that makes linear layers of others.
    "packed_linear": pack_linears,
    "packed_embedding": share_embeddings,
    # Of the parts above.
    "decoder_stack": fuse_decoder_stacks,
    "direct_forward": fuse_forward,
}


def fuse(model: torch.nn.Module, operators: FusedOperators) -> dict[str, int]:
    """Replace parts of a model, in place; what was tried and left goes to the log.

    Args:
        model: loaded, on its device, in evaluation mode, with transformers' own attention.
        operators: of the device; what is None stays as it is.

    Returns:
        How many parts each fusion replaced, by its name; none that replaced nothing.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    pieces = fuse_in_pieces(model, operators, run=lambda: model(input_ids=token, use_cache=False))
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            done: dict[str, int] = end.value
            return done


def fuse_in_pieces(
    model: torch.nn.Module, operators: FusedOperators, *, run: Callable[[], object]
) -> Generator[None, None, dict[str, int]]:
    """The same, a part at a time: the model can run whenever this has yielded.

    Args:
        run: runs the model on anything; its attention may then be ours.
    """
    done: dict[str, int] = {}
    for name, fusion in _FUSIONS.items():
        count = 0
        left: Counter[Left] = Counter()
        for outcome in fusion(model, operators, run):
            if outcome is None:
                count += 1
            elif isinstance(outcome, Left):
                left[outcome] += 1
            yield
        if count:
            done[name] = count
        for (what, reason), times in left.items():
            _log.info("%s is left to transformers in %d of %s: %s", name, times, what, reason)
    return done


def told(done: Mapping[str, int]) -> str:
    """What was replaced, for the log: "rms_norm (65), rotary (1)"."""
    return ", ".join(f"{name} ({count})" for name, count in done.items())
