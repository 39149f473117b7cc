"""The packed linear of the CPU against torch's in float64: any sizes, and a row has the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from support.cpu_operators import EXAMPLES, cpu_operators

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def layer(out: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(out * 1000 + size)
    weight = torch.randn(out, size) / size**0.5
    return weight.to(dtype), torch.randn(out).to(dtype)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 70), st.integers(1, 130), st.integers(1, 130), st.sampled_from(DTYPES), st.booleans())
@example(1, 576, 1536, torch.bfloat16, False)
@example(13, 1536, 576, torch.float32, True)
def test_it_equals_torch(rows: int, out: int, size: int, dtype: torch.dtype, with_bias: bool) -> None:
    ops = cpu_operators()
    weight, bias = layer(out, size, dtype)
    chosen = bias if with_bias else None
    x = torch.randn(rows, size).to(dtype)
    found = ops.linear(x, ops.pack_linear(weight), chosen, size, out)
    expected = functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 33])
def test_a_row_has_the_same_bits_among_any_rows_and_with_any_number_of_threads(dtype: torch.dtype, size: int) -> None:
    ops = cpu_operators()
    weight, bias = layer(100, size, dtype)
    packed = ops.pack_linear(weight)
    x = torch.randn(200, size).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([ops.linear(row, packed, bias, size, 100) for row in x.split(1)])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (2, 7, 8, 13, 16, 25, 97, 200):
                assert torch.equal(ops.linear(x[:rows], packed, bias, size, 100), alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_leading_dimensions_and_strides_are_kept() -> None:
    ops = cpu_operators()
    weight, _ = layer(5, 12, torch.float32)
    x = torch.randn(3, 12, 4).transpose(1, 2)
    found = ops.linear(x, ops.pack_linear(weight), None, 12, 5)
    torch.testing.assert_close(found, functional.linear(x, weight))
    assert ops.linear(x[0, 0], ops.pack_linear(weight), None, 12, 5).shape == (5,)
    assert ops.linear(x[:, :0], ops.pack_linear(weight), None, 12, 5).shape == (3, 0, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 11)}, "last dimension of x must be 12"),
        ({"x": torch.zeros(2, 12).bfloat16()}, "packed is .* but x is"),
        ({"x": torch.zeros(2, 12, dtype=torch.int32)}, "x must be float32 or bfloat16"),
        ({"in_features": 13, "x": torch.zeros(2, 13)}, "dimension 1 of packed must be 13"),
        ({"out_features": 41}, "dimension 0 of packed must be 2"),
        ({"out_features": 0}, "must be at least 1"),
        ({"packed": torch.zeros(1, 12, 16)}, "dimension 2 of packed must be 32"),
        ({"packed": torch.zeros(1, 32, 12).transpose(1, 2)}, "packed must be contiguous"),
        ({"bias": torch.zeros(6)}, "dimension 0 of bias must be 5"),
        ({"bias": torch.zeros(5).bfloat16()}, "bias is"),
    ],
)
def test_a_wrong_argument_is_refused(change: dict[str, Any], message: str) -> None:
    ops = cpu_operators()
    given_: dict[str, Any] = {
        "x": torch.zeros(2, 12),
        "packed": ops.pack_linear(torch.zeros(5, 12)),
        "bias": torch.zeros(5),
        "in_features": 12,
        "out_features": 5,
    }
    ops.linear(**given_)
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**{**given_, **change})


def test_a_weight_that_is_none_is_refused() -> None:
    for weight in (torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, 3).half()):
        with pytest.raises(RuntimeError, match="weight"):
            cpu_operators().pack_linear(weight)
