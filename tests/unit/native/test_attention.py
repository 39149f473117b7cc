"""The CPU's paged attention against the portable tier in float32: any window, chunk, cap, sinks, heads and ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cpu_operators import BLOCK, EXAMPLES, Heads, Packed, cpu_operators
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache

DTYPES = (torch.float32, torch.bfloat16)
# The answer is at most about 1: bfloat16 keeps 8 bits of it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def expected(packed: Packed, spec: AttentionSpec) -> torch.Tensor:
    plain = LayerCache(packed.plain.keys.float(), packed.plain.values.float())
    sinks = None if spec.sinks is None else spec.sinks.float()
    exact = AttentionSpec(spec.scaling, spec.window, spec.chunk, spec.softcap, sinks)
    return PortableAttention().attend(packed.query.float(), plain, packed.batch, exact)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Packed, AttentionSpec]:
    kv = draw(st.integers(1, 4))
    # Every dimension, and more often those that have kernels of their own.
    key_dim = draw(st.integers(1, 70) | st.sampled_from([32, 64, 96]))
    heads = Heads(kv * draw(st.integers(1, 9)), kv, key_dim, draw(st.integers(1, 70) | st.sampled_from([16, 64, 80])))
    parts = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    packed = Packed([n for n, _ in parts], [n + before for n, before in parts], heads, dtype, draw(st.integers(0, 99)))
    sinks = torch.linspace(-2, 2, heads.query).to(dtype) if draw(st.booleans()) else None
    return packed, AttentionSpec(
        scaling=heads.key_dim**-0.5,
        window=draw(st.none() | st.integers(1, 400)),
        chunk=draw(st.none() | st.integers(1, 400)),
        softcap=draw(st.none() | st.sampled_from([0.5, 30.0])),
        sinks=sinks,
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_it_equals_the_portable_tier(case: tuple[Packed, AttentionSpec]) -> None:
    packed, spec = case
    attended = packed.attend(spec)
    assert attended.dtype == packed.query.dtype
    torch.testing.assert_close(attended.float(), expected(packed, spec), rtol=1e-2, atol=TOLERANCE[attended.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [Heads(9, 3, 64, 64), Heads(14, 2, 64, 64), Heads(32, 8, 128, 128), Heads(8, 1, 256, 256), Heads(4, 4, 24, 12)],
)
def test_real_models_heads(heads: Heads, dtype: torch.dtype) -> None:
    packed = Packed([1, 70, 3], [1025, 70, 256], heads, dtype)
    spec = AttentionSpec(heads.key_dim**-0.5)
    torch.testing.assert_close(packed.attend(spec).float(), expected(packed, spec), rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [Heads(6, 2, 40, 24), Heads(6, 2, 64, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_answer_has_the_same_bits_alone_and_in_a_batch_whole_and_in_chunks(dtype: torch.dtype, heads: Heads) -> None:
    sinks = torch.linspace(-1, 1, 6).to(dtype)
    for spec in (
        AttentionSpec(0.2),
        AttentionSpec(0.2, window=300, softcap=4.0, sinks=sinks),
        AttentionSpec(0.2, chunk=77),
    ):
        whole = Packed([700], [700], heads, dtype).attend(spec)
        batch = Packed([9, 700, 1, 13], [40, 700, 900, 13], heads, dtype).attend(spec)
        assert torch.equal(batch[9:709], whole)
        # The content of these is that of the whole's last tokens: only what is asked for differs.
        for last in (1, 5, 100):
            assert torch.equal(Packed([last], [700], heads, dtype).attend(spec), whole[-last:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_answer_has_the_same_bits_with_any_number_of_threads(dtype: torch.dtype) -> None:
    spec = AttentionSpec(0.125, softcap=20.0)
    packed = [Packed([1], [3000], Heads(3, 1, 64, 64), dtype), Packed([1, 33], [700, 400], Heads(9, 3, 64, 64), dtype)]
    answers = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append([one.attend(spec) for one in packed])
    finally:
        torch.set_num_threads(before)
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_stays_its_own(dtype: torch.dtype) -> None:
    packed = Packed([6], [300], Heads(2, 2, 32, 32), dtype)
    whole = packed.attend(AttentionSpec(0.2))
    packed.query[1, 2] = float("nan")
    spoilt = packed.attend(AttentionSpec(0.2))
    assert spoilt[2, 1].isnan().all()
    spoilt[2, 1] = whole[2, 1]
    assert torch.equal(spoilt, whole)


def test_keys_of_any_strides_are_written_where_the_slots_say() -> None:
    ops = cpu_operators()
    for dtype in DTYPES:
        keys, values = torch.zeros(64, 3, 10, dtype=dtype), torch.zeros(64, 3, 6, dtype=dtype)
        key = torch.randn(3, 5, 10).to(dtype).transpose(0, 1)
        value = torch.randn(5, 3, 20).to(dtype)[..., 3:9]
        ops.paged_write(key, value, keys, values, torch.tensor([63, 0, 17, 16, 5]), BLOCK)
        # One key a slot: its value is the answer.
        for token, slot in ((1, 0), (3, 16)):
            found = ops.paged_attention(
                torch.ones(3, 1, 10, dtype=dtype),
                *(keys, values, torch.tensor([[slot // BLOCK]], dtype=torch.int32), [1], [1], BLOCK, 1.0),
                *(None, None, None, None),
            )
            assert torch.equal(found[0], value[token])


def arguments() -> dict[str, Any]:
    packed = Packed([2, 3], [20, 40], Heads(4, 2, 8, 8), torch.float32)
    return {
        "query": packed.query,
        "keys": packed.pages.keys,
        "values": packed.pages.values,
        "block_table": packed.batch.block_table,
        "query_ends": packed.batch.query_ends,
        "contexts": packed.batch.contexts,
        "block_size": BLOCK,
        "scale": 1.0,
        "window": None,
        "chunk": None,
        "softcap": None,
        "sinks": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"query": a["query"].bfloat16()}, "query is .* but keys is"),
        (lambda a: {"query": a["query"].double()}, "must be float32 or bfloat16"),
        (lambda a: {"query": a["query"][:3]}, "3 query heads must be a multiple of the 2"),
        (lambda a: {"query": a["query"][..., ::2]}, "last dimension of query must be contiguous"),
        (lambda a: {"query": a["query"][..., :4]}, "dimension 2 of query must be 8"),
        (lambda a: {"query": a["query"][:, :4]}, "query_ends must rise from 0 to the 4 tokens"),
        (lambda a: {"keys": a["keys"].transpose(1, 2)}, "keys must be contiguous"),
        (lambda a: {"keys": a["keys"][1:], "values": a["values"][1:]}, "whole blocks of 16 slots"),
        (lambda a: {"values": a["values"][:-16]}, "dimension 0 of values"),
        (lambda a: {"block_size": 8}, "block_size must be 16"),
        (lambda a: {"block_table": a["block_table"].long()}, "block_table must be int32"),
        (lambda a: {"block_table": a["block_table"][:1]}, "dimension 0 of block_table must be 2"),
        (
            lambda a: {"block_table": torch.full_like(a["block_table"], 7)},
            "block 7 of sequence 0 is outside the 7",
        ),
        (lambda a: {"block_table": torch.full_like(a["block_table"], -1)}, "block -1 of sequence 0"),
        (lambda a: {"query_ends": [2]}, "query_ends has 1 sequences but contexts 2"),
        (lambda a: {"query_ends": [2, 4]}, "query_ends must end at the 5 tokens"),
        (lambda a: {"query_ends": [2, 6]}, "that of sequence 1 is 6"),
        (lambda a: {"query_ends": [6, 5]}, "that of sequence 0 is 6"),
        (lambda a: {"query_ends": [-1, 5]}, "that of sequence 0 is -1"),
        (lambda a: {"contexts": [1, 40]}, "context of sequence 0, 1, must be at least its 2 queries"),
        (lambda a: {"contexts": [20, 49]}, "context of sequence 1, 49, .* fit its 3 blocks"),
        (lambda a: {"contexts": [20, 2**62]}, "fit its 3 blocks"),
        (lambda a: {"window": 0}, "window must be at least 1, not 0"),
        (lambda a: {"chunk": -3}, "chunk must be at least 1, not -3"),
        (lambda a: {"softcap": 0.0}, "softcap must be more than 0"),
        (lambda a: {"softcap": float("nan")}, "softcap must be more than 0"),
        (lambda a: {"sinks": torch.zeros(3)}, "dimension 0 of sinks must be 4"),
    ],
)
def test_a_wrong_argument_is_refused(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    given_ = arguments()
    cpu_operators().paged_attention(**given_)
    with pytest.raises(RuntimeError, match=message):
        cpu_operators().paged_attention(**{**given_, **change(given_)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0, 32])}, "slot 32 of token 1 is outside the 32 slots"),
        ({"slots": torch.tensor([-1, 0])}, "slot -1 of token 0"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots must be int64"),
        ({"slots": torch.tensor([0, 1, 2])}, "dimension 0 of key must be 3"),
        ({"key": torch.zeros(2, 1, 4)}, "dimension 1 of key must be 2"),
        ({"value": torch.zeros(2, 2, 5)}, "dimension 2 of value must be 6"),
        ({"key": torch.zeros(2, 2, 4).bfloat16()}, "key is"),
        ({"value": torch.zeros(2, 6, 2).transpose(1, 2)}, "last dimension of value must be contiguous"),
        ({"block_size": 32}, "block_size must be 16"),
    ],
)
def test_a_wrong_write_is_refused(change: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {
        "key": torch.zeros(2, 2, 4),
        "value": torch.zeros(2, 2, 6),
        "keys": torch.zeros(32, 2, 4),
        "values": torch.zeros(32, 2, 6),
        "slots": torch.tensor([3, 31]),
        "block_size": BLOCK,
    }
    cpu_operators().paged_write(**given_)
    with pytest.raises(RuntimeError, match=message):
        cpu_operators().paged_write(**{**given_, **change})


def test_a_step_without_tokens_is_answered() -> None:
    given_ = arguments()
    changed = {"query": given_["query"][:, :0], "query_ends": [0, 0]}
    assert cpu_operators().paged_attention(**{**given_, **changed}).shape == (0, 4, 8)
