"""RMSNorm, SiLU and rotation of the CPU against transformers' own code for Llama."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from support.cpu_operators import EXAMPLES, cpu_operators

DTYPES = (torch.float32, torch.bfloat16)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bits: a sum in another order may round otherwise, and so may the product with it."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    tolerance = 3e-6 if found.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


@settings(max_examples=EXAMPLES, deadline=None)
@example(49, 168, torch.bfloat16)  # One number is two steps away.
@given(st.integers(1, 90), st.integers(1, 200), st.sampled_from(DTYPES))
def test_rms_norm_equals_transformers(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * size)
    norm = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(rows, size) * 3).to(dtype)
    with torch.inference_mode():
        close(cpu_operators().rms_norm(x, norm.weight, 1e-5), norm(x))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 90), st.integers(1, 200), st.sampled_from(DTYPES))
def test_silu_mul_equals_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * size)
    gate_up = (torch.randn(2, rows, 2 * size) * 5).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    close(cpu_operators().silu_mul(gate_up), functional.silu(gate) * up)


def test_silu_of_large_values_is_finite() -> None:
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0, 1e30])
    close(cpu_operators().silu_mul(torch.cat([gate, torch.ones(6)])), functional.silu(gate))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(1, 70), st.sampled_from(DTYPES))
def test_rotary_equals_transformers_bit_for_bit(
    tokens: int, query_heads: int, key_heads: int, half: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens * half)
    angles = torch.randn(1, tokens, 2 * half)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query = torch.randn(1, tokens, query_heads, 2 * half).to(dtype).transpose(1, 2)
    key = torch.randn(1, tokens, key_heads, 2 * half).to(dtype).transpose(1, 2)
    found = cpu_operators().rotary(query, key, cos, sin)
    for one, expected in zip(found, apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    ops = cpu_operators()
    torch.manual_seed(1)
    x, weight = torch.randn(300, 576).to(dtype), torch.randn(576).to(dtype)
    normed, gated = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x)
    for row in (0, 151, 299):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(ops.silu_mul(x[row : row + 1])[0], gated[row])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(0, 5),
    st.sampled_from((1, 15, 16, 17, 640, 1024, 1025, 5001)),
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([math.nan, math.inf, -math.inf, 9.0]))),
)
def test_first_maxima_equal_torchs(rows: int, size: int, dtype: torch.dtype, changes: list[tuple[int, float]]) -> None:
    x = torch.randint(-3, 4, (rows, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    for place, number in changes:
        x[place % rows if rows else ..., place % size] = number
    maxima, places = x.max(dim=-1)
    expected = torch.where(torch.isfinite(maxima), places, -1)
    for given_ in (x, x.t().contiguous().t()):
        assert torch.equal(cpu_operators().first_maxima(given_), expected)


@pytest.mark.parametrize(
    ("name", "given_", "message"),
    [
        ("first_maxima", (torch.zeros(4),), "x must have 2 dimensions"),
        ("first_maxima", (torch.zeros(2, 4).half(),), "x must be float32 or bfloat16"),
        ("rms_norm", (torch.zeros(2, 4), torch.zeros(5), 1e-5), "dimension 0 of weight must be 4"),
        ("rms_norm", (torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-5), "weight is"),
        ("rms_norm", (torch.zeros(2, 4), torch.zeros(8)[::2], 1e-5), "weight must be contiguous"),
        ("rms_norm", (torch.zeros(2, 4).half(), torch.zeros(4), 1e-5), "x must be float32 or bfloat16"),
        ("silu_mul", (torch.zeros(2, 5),), "last dimension of gate_up must be even"),
        ("silu_mul", (torch.tensor(1.0),), "last dimension of gate_up"),
    ],
)
def test_a_wrong_argument_is_refused(name: str, given_: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(cpu_operators(), name)(*given_)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 5, 8)}, "dimension 0 of query must be 1"),
        ({"query": torch.zeros(1, 3, 5, 7)}, "last dimension of query must be even"),
        ({"query": torch.zeros(1, 3, 8, 5).transpose(2, 3)}, "last dimension of query must be contiguous"),
        ({"key": torch.zeros(1, 3, 4, 8)}, "dimension 2 of key must be 5"),
        ({"key": torch.zeros(1, 3, 5, 8).bfloat16()}, "key is"),
        ({"cos": torch.zeros(1, 4, 8)}, "dimension 1 of cos must be 5"),
        ({"sin": torch.zeros(1, 5, 4)}, "dimension 2 of sin must be 8"),
        ({"sin": torch.zeros(1, 8, 5).transpose(1, 2)}, "sin must be contiguous"),
    ],
)
def test_a_wrong_rotation_is_refused(change: dict[str, Any], message: str) -> None:
    given_ = {
        "query": torch.zeros(1, 3, 5, 8),
        "key": torch.zeros(1, 1, 5, 8),
        "cos": torch.zeros(1, 5, 8),
        "sin": torch.zeros(1, 5, 8),
    }
    cpu_operators().rotary(**given_)
    with pytest.raises(RuntimeError, match=message):
        cpu_operators().rotary(**{**given_, **change})
