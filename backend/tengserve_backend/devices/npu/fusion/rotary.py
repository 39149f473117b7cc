"""Rotary embedding by one operator for queries and one for keys, instead of five each.

Models call `apply_rotary_pos_emb` of their own Python module, a global name. So a switch takes the name's place, once
a process: it goes to the fused operator during a forward of a model that was fused, and to the original function
otherwise, so other models of the family in the process are untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.fusion.agreement import Left, disagreement, random_input

_NAME = "apply_rotary_pos_emb"
_Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# The sizes of what is rotated, by original function, for which the model that runs now uses the operator.
_fused_sizes: ContextVar[Mapping[_Function, frozenset[int]]] = ContextVar(
    "tengserve_fused_rotary", default=MappingProxyType({})
)


class _Switch:
    """A function of the modelling module, or the fused operator.

    Args:
        original: the function.
    """

    def __init__(self, original: _Function) -> None:
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 4 and not options and self._fits(*args):
            return _rotated(*args)
        return self.original(*args, **options)

    def _fits(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        size = q.shape[-1]
        agreed = size in _fused_sizes.get().get(self.original, ())
        return agreed and cos.shape[-1] == size and q.dim() == 4 and cos.dim() == 3 and cos.dtype == q.dtype


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, heads, T, dim], k likewise, cos and sin [1 or batch, T, dim].

    Models get q and k by transposing [batch, T, heads, dim], which is also how attention wants them: that way round
    nothing is copied.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned_q, turned_k = (operators.rotary(x.transpose(1, 2).contiguous(), cos, sin).transpose(1, 2) for x in (q, k))
    return turned_q, turned_k


def fuse_rotary(model: torch.nn.Module) -> tuple[int, list[Left]]:
    """Let a model use the operator wherever it agrees with the model's own function.

    Returns:
        How many functions are switched, and which were left.
    """
    like = next(model.parameters())
    heads = {module.head_dim for module in model.modules() if isinstance(getattr(module, "head_dim", None), int)}
    agreed: dict[_Function, frozenset[int]] = {}
    left: list[Left] = []
    for name in sorted({type(module).__module__ for module in model.modules()}):
        namespace = sys.modules[name]
        function = getattr(namespace, _NAME, None)
        if function is None:
            continue
        original = function.original if isinstance(function, _Switch) else function
        reasons = {
            size: _reason(original, size, like, whole=not heads or size in heads) for size in _rotated_sizes(model)
        }
        left += [Left(f"{name}.{_NAME}", reason) for reason in reasons.values() if reason]
        if sizes := frozenset(size for size, reason in reasons.items() if not reason):
            agreed[original] = sizes
            if function is original:
                setattr(namespace, _NAME, _Switch(original))
    if agreed:
        model.register_forward_pre_hook(lambda *_: _set(agreed))
        model.register_forward_hook(lambda *_: _set({}), always_call=True)
    return len(agreed), left


def _set(sizes: Mapping[_Function, frozenset[int]]) -> None:
    _fused_sizes.set(sizes)


def _rotated_sizes(model: torch.nn.Module) -> set[int]:
    """Elements of a head that the model's rotary embeddings cover: two a frequency."""
    return {2 * buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@torch.no_grad()
def _reason(function: _Function, size: int, like: torch.Tensor, *, whole: bool) -> str:
    """Why the operator may not take a function's place for embeddings of this size: one clause, or "".

    Args:
        function: the model's own.
        size: elements that are rotated.
        like: a weight.
        whole: whether the model has heads of this size.
    """
    angles = random_input(1, 5, size, like=like).float()
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    if not whole and _answer(function, 2 * size, cos, sin) is not None:
        return "it rotates a part of a head"
    own = _answer(function, size, cos, sin)
    if own is None:
        return "it is called in another way"
    q, k = _query_and_key(size, like)
    both = (lambda: torch.cat(own, 1)), (lambda: torch.cat(_rotated(q, k, cos, sin), 1))
    return disagreement(*both)


def _answer(
    function: _Function, size: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    q, k = _query_and_key(size, cos)
    try:
        turned_q, turned_k = function(q, k, cos, sin)
    except Exception:  # noqa: BLE001  # foreign code that was meant for other arguments
        return None
    return turned_q, turned_k


def _query_and_key(size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # As models make them: transposed. Of different numbers of heads, for some models have so.
    q, k = (random_input(1, 5, heads, size, like=like).transpose(1, 2) for heads in (4, 2))
    return q, k
