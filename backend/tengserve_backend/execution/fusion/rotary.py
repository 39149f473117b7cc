"""Rotary embedding by one operator instead of ten.

Models call `apply_rotary_pos_emb` of their own Python module, a global name. So a switch takes the name's place, once
a process: it goes to the fused operator during a forward of a model that was fused, and to the original function
otherwise, so other models of the family in the process are untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators, Rotary

_NAME = "apply_rotary_pos_emb"
_Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the model that runs now uses in a function's place: an operator, for these sizes of what is rotated."""

    operator: Rotary
    sizes: frozenset[int]


# By original function.
_agreed: ContextVar[Mapping[_Function, _Agreed]] = ContextVar("tengserve_fused_rotary", default=MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class RotaryHook:
    """Says what the model that runs now uses, before its forward and after it.

    Attributes:
        agreed: by original function.
    """

    agreed: Mapping[_Function, _Agreed]

    def __call__(self, *_: object) -> None:
        """As a hook."""
        _agreed.set(self.agreed)


class _Switch:
    """A function of the modelling module, or the fused operator.

    Args:
        original: the function.
    """

    def __init__(self, original: _Function) -> None:
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(self, *args: Any, **options: Any) -> Any:
        agreed = _agreed.get().get(self.original)
        if agreed is not None and len(args) == 4 and not options and _fits(agreed.sizes, *args):
            return agreed.operator(*args)
        return self.original(*args, **options)


def _fits(sizes: frozenset[int], q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    size = q.shape[-1]
    return size in sizes and cos.shape[-1] == size and q.dim() == 4 and cos.dim() == 3 and cos.dtype == q.dtype


def fuse_rotary(model: torch.nn.Module, operators: FusedOperators) -> Iterator[Left | None]:
    """Let a model use the operator wherever it agrees with the model's own function.

    Yields:
        None for each function that is switched, and why for each that is not.
    """
    operator = operators.rotary
    if operator is None:
        return
    like = next(model.parameters())
    heads = {module.head_dim for module in model.modules() if isinstance(getattr(module, "head_dim", None), int)}
    agreed: dict[_Function, _Agreed] = {}
    for name in sorted({type(module).__module__ for module in model.modules()}):
        namespace = sys.modules[name]
        function = getattr(namespace, _NAME, None)
        if function is None:
            continue
        original = function.original if isinstance(function, _Switch) else function
        trial = _Trial(original, operator, operators.is_fault, like)
        reasons = {size: trial.reason(size, whole=not heads or size in heads) for size in _rotated_sizes(model)}
        for reason in filter(None, reasons.values()):
            yield Left(f"{name}.{_NAME}", reason)
        if sizes := frozenset(size for size, reason in reasons.items() if not reason):
            agreed[original] = _Agreed(operator, sizes)
            if function is original:
                setattr(namespace, _NAME, _Switch(original))
            yield None
    if agreed:
        model.register_forward_pre_hook(RotaryHook(agreed))
        model.register_forward_hook(RotaryHook({}), always_call=True)


def _rotated_sizes(model: torch.nn.Module) -> set[int]:
    """Elements of a head that the model's rotary embeddings cover: two a frequency."""
    return {2 * buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@dataclass(frozen=True, slots=True)
class _Trial:
    """A model's own function beside an operator, on random input.

    Attributes:
        own: the function.
        operator: that may take its place.
        is_fault: see FusedOperators.
        like: a weight.
    """

    own: _Function
    operator: Rotary
    is_fault: Callable[[BaseException], bool]
    like: torch.Tensor

    @torch.no_grad()
    def reason(self, size: int, *, whole: bool) -> str:
        """Why the operator may not be used for embeddings of this size: one clause, or "".

        Args:
            size: elements that are rotated.
            whole: whether the model has heads of this size.
        """
        angles = random_input(1, 5, size, like=self.like).float()
        cos, sin = angles.cos().to(self.like.dtype), angles.sin().to(self.like.dtype)
        if not whole and self._answer(2 * size, cos, sin) is not None:
            return "it rotates a part of a head"
        own = self._answer(size, cos, sin)
        if own is None:
            return "it is called in another way"
        q, k = _query_and_key(size, self.like)
        return disagreement(
            lambda: torch.cat(own, 1), lambda: torch.cat(self.operator(q, k, cos, sin), 1), self.is_fault
        )

    def _answer(self, size: int, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        q, k = _query_and_key(size, cos)
        try:
            turned_q, turned_k = self.own(q, k, cos, sin)
        except Exception:  # noqa: BLE001  # foreign code that was meant for other arguments
            return None
        return turned_q, turned_k


def _query_and_key(size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # As models make them: transposed. Of different numbers of heads, for some models have so.
    q, k = (random_input(1, 5, heads, size, like=like).transpose(1, 2) for heads in (4, 2))
    return q, k
