"""Weights of 8 and 4 bits: what becomes of the numbers of a linear layer, and what they stand for afterwards.

Only weights are quantized. Activations stay as they are, so an answer depends on its own tokens alone, as ever.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch

GROUP = 32
"""Inputs of a row that share a scale: as in the Q4_1 and Q8_0 of GGUF files, whose numbers nearly survive therefore."""

_INT8_MOST = 127
_INT4_MOST = 15
_ROWS_AT_ONCE = 2048
"""Rows of a weight that are float32 at the same time: a head has a hundred thousand."""


class Quantization(enum.Enum):
    """How linear layers keep their weights; values are those of the setting."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Each 32 inputs of a row have a scale: a number is integer * scale.

    Attributes:
        integers: int8 [out, in], from -127 to 127.
        scales: bfloat16 [out, groups].
    """

    integers: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.integers.shape

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """What rows stand for, in float32; rounded where bfloat16 is multiplied."""
        return _as_multiplied(self.integers[rows] * _each(self.scales[rows], self.shape[1]), dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Each 32 inputs of a row have a scale and a minimum: a number is integer * scale + minimum.

    Attributes:
        integers: uint8 [out, in], from 0 to 15.
        scales, minimums: bfloat16 [out, groups].
    """

    integers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.integers.shape

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """What rows stand for, in float32; rounded where bfloat16 is multiplied."""
        scale, minimum = (_each(factors[rows], self.shape[1]) for factors in (self.scales, self.minimums))
        return _as_multiplied(self.integers[rows] * scale + minimum, dtype)


QuantizedWeight = Int8Weight | Int4Weight


@torch.no_grad()
def to_int8(weight: torch.Tensor) -> Int8Weight:
    """A weight [out, in] in 8 bits. The largest magnitude of a group becomes 127."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), -(-weight.shape[1] // GROUP), dtype=torch.bfloat16)
    for rows in _parts(len(weight)):
        part = _grouped(weight[rows])
        scales[rows] = part.abs().amax(2) / _INT8_MOST
        codes = (part / _divisor(scales[rows])).round().clamp_(-_INT8_MOST, _INT8_MOST)
        integers[rows] = codes.flatten(1)[:, : weight.shape[1]].to(torch.int8)
    return Int8Weight(integers, scales)


@torch.no_grad()
def to_int4(weight: torch.Tensor) -> Int4Weight:
    """A weight [out, in] in 4 bits. The least number of a group becomes 0 and the largest 15."""
    integers = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(len(weight), -(-weight.shape[1] // GROUP), dtype=torch.bfloat16)
    minimums = torch.empty_like(scales)
    for rows in _parts(len(weight)):
        part = _grouped(weight[rows])
        minimums[rows] = part.amin(2)
        # From the minimum as it is kept, so that its rounding does not move the other numbers.
        above = part - minimums[rows].float()[:, :, None]
        scales[rows] = above.amax(2).clamp_(min=0) / _INT4_MOST
        codes = (above / _divisor(scales[rows])).round().clamp_(0, _INT4_MOST)
        integers[rows] = codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
    return Int4Weight(integers, scales, minimums)


def product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """What a layer with such a weight answers, by plain torch in float32, as x's dtype."""
    out = weight.shape[0]
    answer = torch.cat([x.float() @ weight.numbers(rows, x.dtype).t() for rows in _parts(out)], -1)
    return (answer if bias is None else answer + bias.float()).to(x.dtype)


def _parts(rows: int) -> Iterator[slice]:
    return (slice(begin, min(rows, begin + _ROWS_AT_ONCE)) for begin in range(0, rows, _ROWS_AT_ONCE))


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 32] in float32. A last group is filled up by its last number, which makes it no wider."""
    missing = -rows.shape[1] % GROUP
    whole = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1) if missing else rows
    return whole.float().reshape(len(rows), -1, GROUP)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 1]. Numbers that are all alike have a scale of zero, and any integers will do."""
    scales = scales.float()
    return torch.where(scales > 0, scales, 1.0)[:, :, None]


def _each(factors: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, groups] to [rows, size], in float32."""
    return factors.float().repeat_interleave(GROUP, 1)[:, :size]


def _as_multiplied(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded as the operator does, but for a rounding to float16 before: to bfloat16, of two the greater magnitude."""
    if dtype != torch.bfloat16:
        return numbers
    return ((numbers.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
