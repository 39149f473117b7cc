"""Each fused operator on the device against plain arithmetic in float32 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.devices.npu.errors import explain, is_fault
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion import FUSIONS
from tengserve_backend.devices.npu.operators import Capabilities, Operator
from tengserve_backend.devices.npu.paged_attention import FusedPagedAttention, why_not
from tengserve_backend.errors import DeviceLostError, TengserveError, one_line
from tengserve_backend.execution.attention.check import TOLERANCE, attention_errors
from tengserve_backend.execution.attention.tier import AttentionNeeds

_TOKENS, _SIZE, _HEADS, _HEAD_DIM = 33, 4096, 8, 128
_EPSILON = 1e-6
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """One operator in one number format.

    Attributes:
        operator: its name in torch-npu; two names where they are checked together.
        what: shapes, in words.
        dtype: the number format, "" where nothing was tried.
        share: largest difference from the CPU, as a share of the largest element; None when there is no answer.
        bound: what `share` may be.
        reason: why there is no answer, or ""; one clause.
        tried: it was called; False where it is known not to be there.
        lost: the call lost the device.
    """

    operator: str
    what: str
    dtype: str
    share: float | None
    bound: float
    reason: str = ""
    tried: bool = True
    lost: bool = False

    @property
    def right(self) -> bool:
        """Whether it gave the CPU's answer."""
        return self.share is not None and self.share <= self.bound


@dataclass(frozen=True, slots=True)
class _Case:
    """What is tried.

    Attributes:
        operator, what: see OperatorResult.
        absent: why it is not tried, or "".
        share: runs it in a number format, see OperatorResult.
    """

    operator: str
    what: str
    absent: str
    share: Callable[[NpuDevice, torch.dtype], float]


@torch.inference_mode()
def check_operators(
    device: NpuDevice, dtypes: tuple[torch.dtype, ...], found: Capabilities
) -> Iterator[OperatorResult]:
    """Try each operator in each number format; ends early when the device is lost.

    Args:
        device: whose thread this is.
        dtypes: that the chip computes in.
        found: what the installed torch-npu has.
    """
    for case in _cases(device.family, found):
        if case.absent:
            yield OperatorResult(case.operator, case.what, "", None, 0.0, case.absent, tried=False)
            continue
        for dtype in dtypes:
            result = _result(case, device, dtype)
            yield result
            if result.lost:
                return


def _result(case: _Case, device: NpuDevice, dtype: torch.dtype) -> OperatorResult:
    name, bound = str(dtype).removeprefix("torch."), TOLERANCE[dtype]
    try:
        share = case.share(device, dtype)
    except Exception as error:  # noqa: BLE001  # whatever a device's kernel raises is what the report is about
        return OperatorResult(case.operator, case.what, name, None, bound, said(error), lost=is_fault(error))
    return OperatorResult(case.operator, case.what, name, share, bound)


def said(error: Exception) -> str:
    """What an error says, on one line that is not too long; of the device's own, what it means."""
    if isinstance(error, DeviceLostError) and error.__cause__ is not None:
        return f"{error.message} {explain(error.__cause__)}"
    if isinstance(error, TengserveError):
        return error.message
    text = explain(error) or f"{type(error).__name__}: {error}"
    return one_line(text.strip())[:_MAX_REASON_CHARS]


def _cases(family: NpuFamily, found: Capabilities) -> list[_Case]:
    def absent(operator: Operator, families: frozenset[NpuFamily]) -> str:
        return found.missing.get(operator) or ("" if family in families else f"{family.value} is not known to have it")

    cases = [
        _Case(
            fusion.operator.value,
            what,
            absent(fusion.operator, fusion.families),
            share,
        )
        for fusion, what, share in (
            (FUSIONS["rms_norm"], f"rows of {_SIZE}", _rms_norm),
            (FUSIONS["rotary"], f"{_HEADS} heads of {_HEAD_DIM}", _rotary),
            (FUSIONS["swiglu"], f"rows of {_SIZE}", _swiglu),
        )
    ]
    both = f"{Operator.SCATTER_CACHE.value} and {Operator.ATTENTION.value}"
    for needs, what in (
        (AttentionNeeds(8, 2, 128, 128), "8 heads of 128 on 2, prompts, chunks and decodes past 512 tokens"),
        (AttentionNeeds(9, 3, 64, 64), "9 heads of 64 on 3, the same"),
        (AttentionNeeds(8, 8, 128, 128, window=100), "8 heads of 128, a window of 100 tokens"),
    ):
        reason = why_not(needs, family=family, dtype=torch.float16, found=found)
        cases.append(_Case(both, what, reason, _attention(needs)))
    return cases


def _attention(needs: AttentionNeeds) -> Callable[[NpuDevice, torch.dtype], float]:
    def share(device: NpuDevice, dtype: torch.dtype) -> float:
        tier = FusedPagedAttention(device.torch_device)
        (error,) = attention_errors(tier, [needs], dtype=dtype, device=device.torch_device, upload=device.upload)
        return error.share

    return share


def _rms_norm(device: NpuDevice, dtype: torch.dtype) -> float:
    x, weight = _random(0, _TOKENS, _SIZE).to(dtype), _random(1, _SIZE).to(dtype)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON) * weight.float()
    place = device.torch_device
    return _share(operators.rms_norm(x.to(place), weight.to(place), epsilon=_EPSILON), expected)


def _rotary(device: NpuDevice, dtype: torch.dtype) -> float:
    x = _random(2, 1, _TOKENS, _HEADS, _HEAD_DIM).to(dtype)
    half = _HEAD_DIM // 2
    angles = torch.arange(_TOKENS).unsqueeze(1) * torch.logspace(0, -4, half).unsqueeze(0)
    angles = torch.cat([angles, angles], -1).reshape(1, _TOKENS, 1, _HEAD_DIM)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = x.float()
    turned = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    expected = wide * cos.float() + turned * sin.float()
    place = device.torch_device
    return _share(operators.rotary(x.to(place), cos.to(place), sin.to(place)), expected)


def _swiglu(device: NpuDevice, dtype: torch.dtype) -> float:
    both = _random(3, _TOKENS, 2 * _SIZE).to(dtype)
    gate, up = both.float().chunk(2, -1)
    return _share(operators.swiglu(both.to(device.torch_device)), gate * torch.sigmoid(gate) * up)


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _share(got: torch.Tensor, expected: torch.Tensor) -> float:
    share = float((got.to("cpu", torch.float32) - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(share) else share
