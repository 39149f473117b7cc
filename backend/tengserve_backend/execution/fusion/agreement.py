"""Whether a fused part gives the answer of the part that it would replace."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch

from tengserve_backend.errors import OperatorError

# Share of the largest element. In half precision transformers rounds between its operators and a fused one does not.
_BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Left(NamedTuple):
    """A part that was tried and left.

    Attributes:
        what: its class or function.
        reason: one clause.
    """

    what: str
    reason: str


class Trial(enum.Enum):
    """That one takes several turns, between which the model can run."""

    GOES_ON = enum.auto()


def disagreement(
    own: Callable[[], torch.Tensor],
    fused: Callable[[], torch.Tensor],
    is_fault: Callable[[BaseException], bool],
    *,
    exactly: bool = False,
    bound: float | None = None,
) -> str:
    """Why a fused part may not replace another: one clause, or "" when it may.

    Args:
        own: the other's answer to some input; called first.
        fused: the fused one's answer to the same.
        is_fault: whether an error says that the device is lost.
        exactly: the answers must be the same to the bit.
        bound: how much they may differ, as a share of the largest element; None takes what suits the dtype.

    Raises:
        Exception: what says that the device is lost.
    """
    try:
        expected = own()
    except Exception as error:  # foreign model code that was meant for other input
        if is_fault(error):
            raise
        return f"it fails with {type(error).__name__} on random input"
    bound = _BOUNDS.get(expected.dtype) if bound is None else bound
    if bound is None:
        return f"its answer is in {expected.dtype}"
    try:
        got = fused()
    except OperatorError as error:
        return error.message
    except Exception as error:  # whatever a device's kernel raises only means "not this one"
        if is_fault(error):
            raise
        return f"the fused operator fails with {type(error).__name__}"
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"its answer is {list(expected.shape)} in {expected.dtype}, not {list(got.shape)} in {got.dtype}"
    if torch.equal(got, expected):
        return ""  # Both may be zero, of which nothing is a share.
    if exactly:
        return "the answers are not the same to the bit"
    share = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    # Written so that NaN disagrees.
    return "" if share <= bound else f"the answers differ by {share:.1%} of the largest element"


def random_input(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Normal numbers, the same at every load, in a tensor's dtype and on its device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
