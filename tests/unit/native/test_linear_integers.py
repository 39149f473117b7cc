"""Linear layers over weights of 8 and 4 bits against torch's over what the integers stand for, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from support.cpu_operators import EXAMPLES, cpu_operators

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Of a number that is rounded to float16 and then to bfloat16; and of a column's largest scale or minimum, for one that
# is less than float16 has.
ROUNDED, NEARLY_ZERO = 2**-8 + 2**-10, 2**-21
GROUP = 32

Weight = tuple[torch.Tensor, Callable[..., torch.Tensor], torch.Tensor]
"""Packed, the operator that reads it, and the numbers [out, in] that it stands for, not rounded."""


def factors(out: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Of each group, in (0, 1)."""
    return (torch.rand(out, -(-size // GROUP), generator=generator) + 2**-8).bfloat16()


def each(factors: torch.Tensor, size: int) -> torch.Tensor:
    return factors.float().repeat_interleave(GROUP, 1)[:, :size]


def as_multiplied(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest bfloat16, ties to the greater magnitude."""
    if dtype == torch.bfloat16:
        numbers = ((numbers.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
    return numbers.double()


def int8_weight(out: int, size: int, magnitude: float = 1) -> Weight:
    generator = torch.Generator().manual_seed(out * 1000 + size)
    integers = torch.randint(-128, 128, (out, size), generator=generator).to(torch.int8)
    scales = factors(out, size, generator) * magnitude / (100 * size**0.5)
    ops = cpu_operators()
    numbers = integers * each(scales, size)
    return ops.pack_linear_int8(integers, scales), ops.linear_int8, numbers


def int4_weight(out: int, size: int, magnitude: float = 1) -> Weight:
    generator = torch.Generator().manual_seed(out * 1000 + size)
    integers = torch.randint(0, 16, (out, size), generator=generator).to(torch.uint8)
    scales, minimums = (factors(out, size, generator) * magnitude / size**0.5 / part for part in (8, -1))
    ops = cpu_operators()
    numbers = integers * each(scales, size) + each(minimums, size)
    return ops.pack_linear_int4(integers, scales, minimums), ops.linear_int4, numbers


KINDS = (int8_weight, int4_weight)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 100),
    st.integers(1, 130),
    st.integers(1, 130),
    st.sampled_from(DTYPES),
    st.booleans(),
)
@example(int4_weight, 1, 576, 1536, torch.bfloat16, False)
@example(int8_weight, 33, 1536, 576, torch.bfloat16, False)
@example(int4_weight, 13, 1536, 576, torch.float32, True)
def test_it_equals_torch(
    kind: Callable[..., Weight],
    rows: int,
    out: int,
    size: int,
    dtype: torch.dtype,
    with_bias: bool,
) -> None:
    packed, linear, numbers = kind(out, size)
    bias = torch.randn(out).to(dtype) if with_bias else None
    x = torch.randn(rows, size).to(dtype)
    found = linear(x, packed, bias, size, out)
    expected = functional.linear(x.double(), as_multiplied(numbers, dtype), None if bias is None else bias.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [1, 2**9, 2**-5, 2**13, 2**-16, 2**60, 2**-60])
def test_each_number_is_what_its_integer_stands_for(
    kind: Callable[..., Weight], dtype: torch.dtype, magnitude: float
) -> None:
    packed, linear, numbers = kind(70, 66, magnitude)
    found = linear(torch.eye(66, dtype=dtype), packed, None, 66, 70).double()
    if dtype == torch.float32 or cpu_operators().isa() != "amx":
        assert torch.equal(found, as_multiplied(numbers, dtype).t())
    else:
        largest = numbers.abs().amax(1).double()
        assert bool(((found - numbers.t()).abs() <= ROUNDED * numbers.t().abs() + NEARLY_ZERO * largest).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_rows_and_with_any_number_of_threads(
    kind: Callable[..., Weight], dtype: torch.dtype, size: int
) -> None:
    packed, linear, _ = kind(100, size)
    x = torch.randn(200, size).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(row, packed, None, size, 100) for row in x.split(1)])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (2, 13, 16, 25, 32, 33, 97, 200):
                assert torch.equal(linear(x[:rows], packed, None, size, 100), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.zeros(1, 1216)}, "packed must be uint8"),
        ({"packed": torch.zeros(1, 768, dtype=torch.uint8)}, "dimension 1 of packed must be 1216"),
        ({"packed": torch.zeros(2, 1216, dtype=torch.uint8)}, "dimension 0 of packed must be 1"),
        ({"packed": torch.zeros(1, 2432, dtype=torch.uint8)[:, ::2]}, "packed must be contiguous"),
        ({"in_features": 33, "x": torch.zeros(2, 33)}, "dimension 1 of packed must be 2304"),
        ({"out_features": 33}, "dimension 0 of packed must be 2"),
    ],
)
def test_a_wrong_argument_is_refused(change: dict[str, Any], message: str) -> None:
    ops = cpu_operators()
    given_: dict[str, Any] = {
        "x": torch.zeros(2, 12),
        "packed": int8_weight(5, 12)[0],
        "bias": None,
        "in_features": 12,
        "out_features": 5,
    }
    ops.linear_int8(**given_)
    with pytest.raises(RuntimeError, match=message):
        ops.linear_int8(**{**given_, **change})


def test_a_weight_that_is_none_is_refused() -> None:
    ops = cpu_operators()
    integers, scales = torch.zeros(3, 40, dtype=torch.int8), torch.zeros(3, 2).bfloat16()
    for wrong in (integers[0], integers[:, :0], integers.int()):
        with pytest.raises(RuntimeError, match="integers"):
            ops.pack_linear_int8(wrong, scales)
    for wrong in (scales[:, :1], scales.float()):
        with pytest.raises(RuntimeError, match="scales"):
            ops.pack_linear_int8(integers, wrong)
    codes = integers.to(torch.uint8)
    for wrong in (codes[0], codes[:0], integers):
        with pytest.raises(RuntimeError, match="integers"):
            ops.pack_linear_int4(wrong, scales, scales)
    for wrong in (scales[:, :1], scales.float()):
        with pytest.raises(RuntimeError, match="scales"):
            ops.pack_linear_int4(codes, wrong, scales)
        with pytest.raises(RuntimeError, match="minimums"):
            ops.pack_linear_int4(codes, scales, wrong)


@pytest.mark.parametrize("exponent", [-10, -14, -15, -18, -22, -24, -30])
@pytest.mark.parametrize("small", [1, 16, 31])
def test_small_columns_beside_large_ones_keep_their_numbers(exponent: int, small: int) -> None:
    """A panel has 32 columns, whose scales may be of any magnitudes."""
    size, out = 64, 32
    scales = torch.full((out, size // GROUP), 0.01).bfloat16()
    scales[:small] = 1.07 * 2.0**exponent
    integers = torch.arange(-127, 128)[torch.arange(out * size).view(out, size) * 7 % 255].to(torch.int8)
    minimums = (scales.float() * -7).bfloat16()
    ops = cpu_operators()
    codes = (integers.int() + 128).div(17, rounding_mode="floor").to(torch.uint8)
    x = torch.eye(size).bfloat16()
    for operator, packed, numbers in (
        (ops.linear_int8, ops.pack_linear_int8(integers, scales), integers * each(scales, size)),
        (
            ops.linear_int4,
            ops.pack_linear_int4(codes, scales, minimums),
            codes * each(scales, size) + each(minimums, size),
        ),
    ):
        got = operator(x, packed, None, size, out).t().float()
        # Of a number, and of the step between two of them.
        bound = numbers.abs() * ROUNDED + each(scales, size) * 2**-8
        assert bool(((got - numbers).abs() <= bound).all())


@pytest.mark.parametrize("exponent", [-8, -16, -24, -40])
def test_small_groups_beside_large_ones_lose_nothing_that_their_column_has(exponent: int) -> None:
    size, out = 64, 40
    scales = torch.full((out, 2), 1.07).bfloat16()
    scales[:, 1] *= 2.0**exponent
    integers = torch.arange(-127, 128)[torch.arange(out * size).view(out, size) * 7 % 255].to(torch.int8)
    numbers = integers * each(scales, size)
    ops = cpu_operators()
    packed = ops.pack_linear_int8(integers, scales)
    for dtype in DTYPES:
        got = ops.linear_int8(torch.eye(size).to(dtype), packed, None, size, out).t().float()
        rounded = ROUNDED if dtype == torch.bfloat16 else 0
        assert bool(((got - numbers).abs() <= rounded * numbers.abs() + NEARLY_ZERO * 1.07).all())


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_a_column_with_a_scale_that_is_no_number_answers_none(wrong: float) -> None:
    codes, scales = torch.ones(40, 64, dtype=torch.uint8), torch.ones(40, 2).bfloat16()
    of_one = scales.clone()
    of_one[3, 1] = wrong
    ops = cpu_operators()
    for dtype in DTYPES:
        x = torch.ones(2, 64).to(dtype)
        for answer in (
            ops.linear_int8(x, ops.pack_linear_int8(codes.char(), of_one), None, 64, 40),
            ops.linear_int4(x, ops.pack_linear_int4(codes, of_one, scales), None, 64, 40),
            ops.linear_int4(x, ops.pack_linear_int4(codes, scales, of_one), None, 64, 40),
        ):
            assert answer[:, 3].isnan().all()
            assert answer[:, [0, 2, 4, 39]].isfinite().all()


@pytest.mark.parametrize("exponent", [118, 119, 127])
def test_the_largest_scales_answer_what_is_in_range(exponent: int) -> None:
    ones, scales = torch.ones(32, 32), torch.full((32, 1), 2.0**exponent).bfloat16()
    ops = cpu_operators()
    x = torch.zeros(2, 32)
    x[0, 3] = 2.0**-20
    for dtype in DTYPES:
        for answer in (
            ops.linear_int8(x.to(dtype), ops.pack_linear_int8(ones.char(), scales), None, 32, 32),
            ops.linear_int4(x.to(dtype), ops.pack_linear_int4(ones.byte(), scales, scales * 0), None, 32, 32),
        ):
            assert bool((answer[0] == 2.0 ** (exponent - 20)).all())
            assert not answer[1].any()


def test_weights_of_zero_answer_zero() -> None:
    zeros, none = torch.zeros(48, 64, dtype=torch.int8), torch.zeros(48, 2).bfloat16()
    ops = cpu_operators()
    x = torch.full((3, 64), 1e4).bfloat16()
    assert not ops.linear_int8(x, ops.pack_linear_int8(zeros, none), None, 64, 48).any()
    assert not ops.linear_int4(x, ops.pack_linear_int4(zeros.byte(), none, none), None, 64, 48).any()
