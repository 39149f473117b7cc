"""The layers of a decoder as one operator: to the bit what the operators give one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.cpu_operators import BLOCK, EXAMPLES, Heads, Packed, cpu_operators

DTYPES = (torch.float32, torch.bfloat16)
HEADS = Heads(4, 2, 32, 32)


@dataclass(frozen=True)
class Kind:
    """Of a decoder's layers; one window a layer. Weights of 8 or 4 bits, or of the dtype."""

    hidden: int = 64
    heads: Heads = HEADS
    intermediate: int = 96
    windows: tuple[int | None, ...] = (None,)
    rotary: bool = True
    biases: bool = False
    head_norms: bool = False
    bits: int | None = None
    dtype: torch.dtype = torch.float32


class Decoder:
    """Random layers, computed in both ways."""

    def __init__(self, kind: Kind, seed: int = 0) -> None:
        self.ops = cpu_operators()
        self.kind = kind
        self._generator = torch.Generator().manual_seed(seed)
        heads = kind.heads
        self.projected = heads.query * heads.key_dim + heads.kv * (heads.key_dim + heads.value_dim)
        self.layers = [self._layer() for _ in kind.windows]
        self.handle = torch.classes.tengserve_cpu.Decoder(
            kind.hidden, heads.query, heads.kv, heads.key_dim, heads.value_dim, kind.intermediate
        )
        for layer, window in zip(self.layers, kind.windows, strict=True):
            self.handle.add_layer(*layer.values(), 0.2, window, kind.rotary)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(self.kind.dtype)

    def _layer(self) -> dict[str, Any]:
        kind, heads = self.kind, self.kind.heads

        def linear(out: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self._packed(out, size), self.random(out) if kind.biases else None

        def head_norm() -> torch.Tensor | None:
            return self.random(heads.key_dim) if kind.head_norms else None

        projected, output = linear(self.projected, kind.hidden), linear(kind.hidden, heads.query * heads.value_dim)
        gate_up, down = linear(2 * kind.intermediate, kind.hidden), linear(kind.hidden, kind.intermediate)
        return {
            "attention_norm": self.random(kind.hidden),
            "attention_eps": 1e-5,
            "projected": projected[0],
            "projected_bias": projected[1],
            "query_norm": head_norm(),
            "query_eps": 1e-6,
            "key_norm": head_norm(),
            "key_eps": 1e-4,
            "output": output[0],
            "output_bias": output[1],
            "mlp_norm": self.random(kind.hidden),
            "mlp_eps": 1e-3,
            "gate_up": gate_up[0],
            "gate_up_bias": gate_up[1],
            "down": down[0],
            "down_bias": down[1],
        }

    def _packed(self, out: int, size: int) -> torch.Tensor:
        packed: torch.Tensor
        if self.kind.bits is None:
            packed = self.ops.pack_linear(self.random(out, size, scale=size**-0.5))
        elif self.kind.bits == 8:
            integers = torch.randint(-128, 128, (out, size), generator=self._generator).to(torch.int8)
            scales = torch.full((out, -(-size // 32)), size**-0.5 / 100).bfloat16()
            packed = self.ops.pack_linear_int8(integers, scales)
        else:
            codes = torch.randint(0, 16, (out, size), generator=self._generator).to(torch.uint8)
            scales = torch.full((out, -(-size // 32)), size**-0.5 / 8).bfloat16()
            packed = self.ops.pack_linear_int4(codes, scales, scales * -8)
        return packed

    def _linear(self, x: torch.Tensor, layer: dict[str, Any], name: str, size: int, out: int) -> torch.Tensor:
        operator = {None: self.ops.linear, 8: self.ops.linear_int8, 4: self.ops.linear_int4}[self.kind.bits]
        answer: torch.Tensor = operator(x, layer[name], layer[f"{name}_bias"], size, out)
        return answer

    def step(self, counts: Sequence[int], contexts: Sequence[int]) -> dict[str, Any]:
        """Arguments of a step, after the decoder and before what it answers with."""
        pages = [Packed(counts, contexts, self.kind.heads, self.kind.dtype, seed=0).pages for _ in self.kind.windows]
        batch = Packed(counts, contexts, self.kind.heads, self.kind.dtype, seed=0).batch
        tokens = sum(counts)
        positions = torch.cat([torch.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        angles = self.random(1, tokens, self.kind.heads.key_dim).float()
        return {
            "hidden": self.random(1, tokens, self.kind.hidden),
            "cos": angles.cos().to(self.kind.dtype),
            "sin": angles.sin().to(self.kind.dtype),
            "keys": [layer.keys for layer in pages],
            "values": [layer.values for layer in pages],
            "slots": batch.block_table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
            "block_table": batch.block_table,
            "query_ends": batch.query_ends,
            "contexts": batch.contexts,
        }

    def run(self, step: dict[str, Any]) -> torch.Tensor:
        answer: torch.Tensor = self.handle.run(*step.values())
        return answer

    def one_by_one(self, step: dict[str, Any]) -> torch.Tensor:
        """By the other operators, on pages of their own."""
        kind, heads, ops = self.kind, self.kind.heads, self.ops
        hidden = step["hidden"]
        tokens = hidden.shape[1]
        sizes = [heads.query * heads.key_dim, heads.kv * heads.key_dim, heads.kv * heads.value_dim]
        for index, (layer, window) in enumerate(zip(self.layers, kind.windows, strict=True)):
            normed = ops.rms_norm(hidden, layer["attention_norm"], layer["attention_eps"])
            projected = self._linear(normed, layer, "projected", kind.hidden, self.projected).split(sizes, -1)
            query, key, value = (
                part.unflatten(-1, (count, -1))
                for part, count in zip(projected, (heads.query, heads.kv, heads.kv), strict=True)
            )
            if kind.head_norms:
                query = ops.rms_norm(query, layer["query_norm"], layer["query_eps"])
                key = ops.rms_norm(key, layer["key_norm"], layer["key_eps"])
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            if kind.rotary:
                query, key = ops.rotary(query, key, step["cos"], step["sin"])
            pages = step["keys"][index], step["values"][index]
            ops.paged_write(key[0].transpose(0, 1), value[0], *pages, step["slots"], BLOCK)
            attended = ops.paged_attention(
                *(query[0], *pages, step["block_table"], step["query_ends"], step["contexts"], BLOCK),
                *(0.2, window, None, None, None),
            ).reshape(1, tokens, -1)
            hidden = hidden + self._linear(attended, layer, "output", heads.query * heads.value_dim, kind.hidden)
            normed = ops.rms_norm(hidden, layer["mlp_norm"], layer["mlp_eps"])
            gate_up = self._linear(normed, layer, "gate_up", kind.hidden, 2 * kind.intermediate)
            hidden = hidden + self._linear(ops.silu_mul(gate_up), layer, "down", kind.intermediate, kind.hidden)
        return hidden


def copied(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, **{name: [each.clone() for each in step[name]] for name in ("keys", "values")}}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Pages hold NaN where nothing was written."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


def check(decoder: Decoder, counts: Sequence[int], contexts: Sequence[int]) -> None:
    step = decoder.step(counts, contexts)
    other = copied(step)
    before = step["hidden"].clone()
    answer = decoder.run(step)
    expected = decoder.one_by_one(other)
    assert answer.isfinite().all()
    assert torch.equal(answer, expected)
    assert torch.equal(step["hidden"], before)
    for name in ("keys", "values"):
        assert all(same_bits(a, b) for a, b in zip(step[name], other[name], strict=True))


def with_threads(counts: Sequence[int], run: Callable[[], None]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            run()
    finally:
        torch.set_num_threads(before)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kind, list[tuple[int, int]]]:
    kv = draw(st.integers(1, 3))
    rotary = draw(st.booleans())
    key_dim = draw(st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from([32, 64]))
    kind = Kind(
        hidden=draw(st.integers(1, 130) | st.sampled_from([32, 64, 128])),
        heads=Heads(
            kv * draw(st.integers(1, 5)),
            kv,
            key_dim if rotary else key_dim - 1,
            draw(st.integers(1, 40) | st.sampled_from([16, 64])),
        ),
        intermediate=draw(st.integers(1, 100) | st.sampled_from([32, 64, 96])),
        windows=tuple(draw(st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=3))),
        rotary=rotary,
        biases=draw(st.booleans()),
        head_norms=draw(st.booleans()),
        bits=draw(st.sampled_from((None, None, 8, 4))),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    parts = st.tuples(st.integers(1, 30), st.integers(0, 300)) | st.tuples(st.just(1), st.integers(0, 600))
    return kind, draw(st.lists(parts, min_size=1, max_size=5))


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
@example((Kind(576, Heads(9, 3, 64, 64), 1536, (None, None), dtype=torch.bfloat16), [(1, 100)]))
@example((Kind(128, Heads(14, 2, 64, 64), 160, (9, None), biases=True, dtype=torch.bfloat16), [(1, 9), (40, 0)]))
def test_it_equals_the_operators_one_by_one(case: tuple[Kind, list[tuple[int, int]]]) -> None:
    kind, parts = case
    check(Decoder(kind), [count for count, _ in parts], [count + before for count, before in parts])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_any_number_of_rows(dtype: torch.dtype, bits: int | None) -> None:
    decoder = Decoder(Kind(windows=(None, 20), head_norms=bits == 8, bits=bits, dtype=dtype))
    for rows in (1, 2, 15, 16, 17, 31, 33, 95, 96, 97, 200):
        check(decoder, [rows], [rows])
        check(decoder, [1] * rows, [7 + row % 40 for row in range(rows)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_are_computed_at_once(dtype: torch.dtype) -> None:
    decoder = Decoder(Kind(windows=(None, 50), dtype=dtype))
    # The cuts are within the second sequence, and between two.
    check(decoder, [3, 700, 1, 320, 5], [10, 900, 400, 320, 5])
    check(decoder, [1] * 530, [3] * 530)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads(dtype: torch.dtype) -> None:
    decoder = Decoder(Kind(256, Heads(8, 2, 32, 32), 320, (None, 300), dtype=dtype))

    def run() -> None:
        # A sequence that is long alone is cut into parts of its keys.
        check(decoder, [1], [2000])
        check(decoder, [1, 1, 40], [700, 3, 300])
        check(decoder, [130], [500])

    with_threads((1, 2, 3, 5), run)


def test_no_tokens_are_no_work() -> None:
    decoder = Decoder(Kind())
    step = decoder.step([1], [1])
    for name in ("hidden", "cos", "sin"):
        step[name] = step[name][:, :0]
    step |= {"slots": step["slots"][:0], "query_ends": [0], "contexts": [0]}
    assert decoder.run(step).shape == (1, 0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(1, 3, 63)}, "dimension 2 of hidden must be 64"),
        ({"hidden": torch.zeros(2, 3, 64)}, "dimension 0 of hidden must be 1"),
        ({"hidden": torch.zeros(1, 3, 64).bfloat16()}, "hidden is .* but the first layer is"),
        ({"cos": torch.zeros(1, 3, 16)}, "dimension 2 of cos must be 32"),
        ({"sin": torch.zeros(1, 2, 32)}, "dimension 1 of sin must be 3"),
        ({"sin": torch.zeros(1, 3, 64)[..., ::2]}, "sin must be contiguous"),
        ({"keys": []}, "keys and values must be of 1 layers, not 0 and 1"),
        ({"keys": [torch.zeros(64, 2, 16)]}, "keys and values of layer 0 must have 2 heads of 32 and 32 elements"),
        ({"values": [torch.zeros(64, 2, 32).bfloat16()]}, "values is .* but keys is"),
        ({"slots": torch.tensor([0, 1])}, "dimension 0 of slots must be 3"),
        ({"slots": torch.tensor([0, 1, 10**6])}, "slot 1000000 of token 2 is outside"),
        ({"slots": torch.tensor([0, 1, -1])}, "slot -1 of token 2 is outside"),
        ({"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, "slots must be int64"),
        ({"block_table": torch.tensor([[0, 99]], dtype=torch.int32)}, "block 99 of sequence 0 is outside"),
        ({"query_ends": [2]}, "query_ends must end at the 3 tokens"),
        ({"contexts": [2]}, "must be at least its 3 queries"),
        ({"contexts": [100]}, "fit its 2 blocks"),
    ],
)
def test_a_wrong_argument_is_refused(change: dict[str, Any], message: str) -> None:
    decoder = Decoder(Kind())
    step = decoder.step([3], [20])
    decoder.run(step)
    with pytest.raises(RuntimeError, match=message):
        decoder.run({**step, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_norm": torch.zeros(63)}, "dimension 0 of attention_norm must be 64"),
        ({"mlp_norm": torch.zeros(64).bfloat16()}, "mlp_norm is .* but the first layer is"),
        ({"query_norm": torch.zeros(16)}, "dimension 0 of query_norm must be 32"),
        ({"projected": torch.zeros(7, 64, 32)}, "dimension 0 of packed must be 8"),
        ({"projected": torch.zeros(8, 63, 32)}, "dimension 1 of packed must be 64"),
        ({"projected": torch.zeros(8, 64, 32, dtype=torch.int8)}, "packed is .* but x is"),
        ({"output_bias": torch.zeros(63)}, "dimension 0 of bias must be 64"),
        ({"gate_up": torch.zeros(6, 64, 32).bfloat16()}, "packed is .* but x is"),
        ({"down": torch.zeros(2, 32, 96).transpose(1, 2)}, "packed must be contiguous"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_a_wrong_layer_is_refused(change: dict[str, Any], message: str) -> None:
    decoder = Decoder(Kind())
    layer = {**decoder.layers[0], "scale": 1.0, "window": None, "rotary": True}
    with pytest.raises(RuntimeError, match=message):
        decoder.handle.add_layer(*{**layer, **change}.values())
    # The decoder is as it was.
    check(decoder, [3], [20])


def test_wrong_sizes_are_refused() -> None:
    cpu_operators()
    make = torch.classes.tengserve_cpu.Decoder
    for sizes, message in (
        ((64, 3, 2, 32, 32, 96), "the 3 query heads must be a multiple of the 2"),
        ((0, 4, 2, 32, 32, 96), "must be from 1 to"),
        ((2**40, 4, 2, 32, 32, 96), "must be from 1 to"),
    ):
        with pytest.raises(RuntimeError, match=message):
            make(*sizes)
    empty = make(64, 4, 2, 32, 32, 96)
    step = Decoder(Kind()).step([3], [20])
    with pytest.raises(RuntimeError, match="the decoder has no layers"):
        empty.run(*step.values())
    odd = Decoder(replace(Kind(), heads=Heads(2, 2, 31, 32), rotary=False))
    with pytest.raises(RuntimeError, match="heads of 31 elements cannot be rotated"):
        odd.handle.add_layer(*odd.layers[0].values(), 1.0, None, True)
