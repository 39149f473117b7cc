"""What one decoder layer is made of, when it looks like those that the decoder operator computes.

Looks only: `decoder_stack` tries whether it also answers like them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.execution.fusion.gated_mlp import FusedGatedMlp
from tengserve_backend.execution.fusion.linears import LinearPart, PackedLinear
from tengserve_backend.execution.fusion.replacing import has_hooks
from tengserve_backend.execution.fusion.rms_norm import FusedRmsNorm

_LAYER = frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_PROJECTED = (frozenset({*_PROJECTIONS, "o_proj"}), frozenset({"qkv_proj", "o_proj"}))
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Parts of a layer, all of them fused before.

    Attributes:
        module: the layer.
        index: of its pages.
        head_dim: elements of a head that is rotated.
        attention_norm, mlp_norm: before the two halves.
        query_norm, key_norm: of a head, or None.
        projected: to queries, keys and values, in this order.
        output: of the attention.
        gate_up, down: the MLP, the gate first.
    """

    module: torch.nn.Module
    index: int
    head_dim: int
    attention_norm: FusedRmsNorm
    query_norm: FusedRmsNorm | None
    key_norm: FusedRmsNorm | None
    projected: PackedLinear
    output: PackedLinear
    mlp_norm: FusedRmsNorm
    gate_up: PackedLinear
    down: PackedLinear


def decoder_parts(layer: torch.nn.Module) -> DecoderParts | None:
    """The parts of a layer, or None when it is built in another way."""
    parts = _children(layer)
    if parts.keys() != _LAYER:
        return None
    attention, mlp = parts["self_attn"], parts["mlp"]
    inner = _children(attention)
    norms = {name: inner.pop(name) for name in _HEAD_NORMS if name in inner}
    projected = _projected(inner) if inner.keys() in _PROJECTED else None
    if projected is None or len(norms) == 1:
        return None
    if not isinstance(mlp, FusedGatedMlp) or not all(
        isinstance(norm, FusedRmsNorm)
        for norm in (parts["input_layernorm"], parts["post_attention_layernorm"], *norms.values())
    ):
        return None
    linears: list[Any] = [projected, inner["o_proj"], mlp.gate_up_proj, mlp.down_proj]
    index, head_dim = (getattr(attention, name, None) for name in ("layer_idx", "head_dim"))
    if not all(type(each) is PackedLinear for each in linears) or type(index) is not int or type(head_dim) is not int:
        return None
    if any(map(has_hooks, layer.modules())):
        return None  # They belong to somebody.
    fused: Any = parts | norms
    return DecoderParts(
        module=layer,
        index=index,
        head_dim=head_dim,
        attention_norm=fused["input_layernorm"],
        query_norm=fused.get("q_norm"),
        key_norm=fused.get("k_norm"),
        projected=linears[0],
        output=linears[1],
        mlp_norm=fused["post_attention_layernorm"],
        gate_up=linears[2],
        down=linears[3],
    )


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Those that compute something; a dropout does not, in evaluation mode."""
    return {name: child for name, child in module.named_children() if not isinstance(child, torch.nn.Dropout)}


def _projected(children: dict[str, torch.nn.Module]) -> torch.nn.Module | None:
    together = children.get("qkv_proj")
    return together if together is not None else _whole(children[name] for name in _PROJECTIONS)


def _whole(parts: Iterable[torch.nn.Module]) -> PackedLinear | None:
    """The product that layers are all the parts of, in their order."""
    products = [part.product for part in parts if isinstance(part, LinearPart)]
    wholes = {id(whole) for whole, _ in products}
    if len(wholes) != 1 or [index for _, index in products] != list(range(len(_PROJECTIONS))):
        return None
    return products[0][0]
