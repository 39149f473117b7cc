"""The fused tier against the portable one, over the operators' reference functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.npu_operators import npu_operators
from support.npu_reference import REFERENCES
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.operators import Operator
from tengserve_backend.devices.npu.paged_attention import FusedPagedAttention, why_not
from tengserve_backend.errors import OperatorError
from tengserve_backend.execution.attention.check import find_attention_fault
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed_batch import pack
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.scheduling.step import ScheduledSequence, Step

CPU = torch.device("cpu")
# One rounding of the answer; everything before it is computed in float32.
BOUND = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def packed(parts, tables, block_size):
    """A batch of (first position, tokens) of each sequence."""
    snapshot = Snapshot()
    step = Step(
        0,
        tuple(
            ScheduledSequence(index, start, (0,) * count, table, samples=False)
            for index, ((start, count), table) in enumerate(zip(parts, tables, strict=True))
        ),
    )
    return pack(step, snapshot, block_size=block_size).on(snapshot.upload(lambda host: host))


class Pages:
    """A tier with a cache whose blocks lie in no order."""

    def __init__(self, tier, lengths, *, kv_heads, dim, dtype):
        size = tier.block_size
        counts = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [tuple(order.pop() for _ in range(count)) for count in counts]
        self.tier = tier
        self.dtype = dtype
        cache = PagedKVCache(total_blocks=sum(counts), block_size=size, dtype=dtype, device=CPU)
        self.pages = cache.layer(0, LayerShape(kv_heads, dim, dim))

    def step(self, parts, query, key, value, spec):
        """Write and attend. query [T, heads, dim], as models lay it out; key and value [T, kv heads, dim]."""
        batch = packed(parts, self.tables[: len(parts)], self.tier.block_size)
        self.tier.write(self.pages, batch, key.to(self.dtype), value.to(self.dtype))
        return self.tier.attend(query.to(self.dtype).transpose(0, 1), self.pages, batch, spec)


MIXED = [
    # A prompt in chunks, one that fits a step, first tokens, decodes past one block, past 512 and past 2048.
    [(0, 2047), (0, 529), (0, 140), (0, 1)],
    [(2047, 1), (529, 40), (140, 1), (1, 1)],
    [(2048, 1), (569, 1), (141, 1), (2, 300)],
    [(2049, 130), (570, 1), (142, 1), (302, 1)],
]


def off_by(heads, kv_heads, dim, dtype, spec, schedule=MIXED):
    """The largest difference, as a share of the largest element of its step."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(step[index][0] + step[index][1] for step in schedule) for index in range(len(schedule[0]))]
    fused = Pages(FusedPagedAttention(CPU), lengths, kv_heads=kv_heads, dim=dim, dtype=dtype)
    oracle = Pages(PortableAttention(), lengths, kv_heads=kv_heads, dim=dim, dtype=torch.float32)
    worst = 0.0
    for parts in schedule:
        total = sum(count for _, count in parts)
        # Rounded once for both: what is compared is the attention.
        query, key, value = (
            torch.randn(total, count, dim, generator=generator).to(dtype).float()
            for count in (heads, kv_heads, kv_heads)
        )
        got = fused.step(parts, query, key, value, spec)
        expected = oracle.step(parts, query, key, value, spec)
        assert got.dtype is dtype
        worst = max(worst, float((got.float() - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 2, 128), (7, 1, 64)])
def test_equals_portable_on_prompts_chunks_and_decodes(npu, heads, kv_heads, dim, dtype):
    assert off_by(heads, kv_heads, dim, dtype, AttentionSpec(scaling=dim**-0.5)) <= BOUND[dtype]


@pytest.mark.parametrize("window", [1, 2, 128, 129, 1000, 4096])
def test_equals_portable_within_a_window(npu, window):
    assert off_by(4, 2, 64, torch.float16, AttentionSpec(scaling=0.125, window=window)) <= BOUND[torch.float16]


@pytest.mark.parametrize("window", [None, 100])
def test_equals_portable_when_all_decode(npu, window):
    schedule = [[(0, 700), (0, 130)], [(700, 1), (130, 1)], [(701, 1), (131, 1)]]
    spec = AttentionSpec(scaling=0.125, window=window)
    assert off_by(4, 2, 64, torch.float16, spec, schedule) <= BOUND[torch.float16]


def test_the_models_own_scaling_is_used(npu):
    assert off_by(4, 2, 64, torch.float16, AttentionSpec(scaling=0.02)) <= BOUND[torch.float16]


def test_a_shared_prefix_gives_the_same_answer_cold_and_cached(npu):
    generator = torch.Generator().manual_seed(3)
    total, dim, cached = 300, 64, 256
    query, key, value = (torch.randn(total, heads, dim, generator=generator) for heads in (4, 2, 2))
    spec = AttentionSpec(scaling=0.125)
    pages = Pages(FusedPagedAttention(CPU), [total, total], kv_heads=2, dim=dim, dtype=torch.float16)
    cold = pages.step([(0, total)], query, key, value, spec)
    # The second sequence has the first's two full blocks and a last one of its own.
    pages.tables = [(*pages.tables[0][:2], pages.tables[1][0])]
    warm = pages.step([(cached, total - cached)], query[cached:], key[cached:], value[cached:], spec)
    assert torch.equal(warm, cold[cached:])


def test_tiers_of_one_device_share_the_mask():
    assert FusedPagedAttention(CPU)._mask is FusedPagedAttention(CPU)._mask


FITTING = AttentionNeeds(query_heads=32, kv_heads=8, key_dim=128, value_dim=128, window=4096)


@pytest.mark.parametrize("family", [NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_serves_ordinary_layers_on_the_chips_that_have_it(npu, family, dtype):
    assert why_not(FITTING, family=family, dtype=dtype, found=operators.capabilities()) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_dim": 80, "value_dim": 80}, "head dim must be 64 or 128, not 80"),
        ({"key_dim": 256, "value_dim": 256}, "head dim must be 64 or 128, not 256"),
        ({"key_dim": 192}, "head dim must be the same for keys and values, not 192 and 128"),
        ({"query_heads": 30}, "heads must be a multiple of the 8 of keys, at most 64 times as many, not 30"),
        (
            {"query_heads": 256, "kv_heads": 2},
            "heads must be a multiple of the 2 of keys, at most 64 times as many, not 256",
        ),
        ({"query_heads": 264}, "heads must be at most 256, not 264"),
        ({"softcap": True}, "it has no soft-capped scores"),
        ({"sinks": True}, "it has no sinks"),
        ({"chunks": True}, "it has no chunks"),
    ],
)
def test_says_why_it_cannot_serve_a_kind_of_layer(npu, changes, reason):
    needs = replace(FITTING, **changes)
    got = why_not(needs, family=NpuFamily.ATLAS_A2, dtype=torch.float16, found=operators.capabilities())
    assert got == reason


def test_says_why_it_cannot_serve_a_chip_a_dtype_or_a_torch_npu(npu):
    def reason(family=NpuFamily.ATLAS_A2, dtype=torch.float16, found=None):
        return why_not(FITTING, family=family, dtype=dtype, found=found or operators.capabilities())

    for family in set(NpuFamily) - {NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3}:
        assert reason(family) == f"{family.value} has no fused paged attention"
    assert reason(dtype=torch.float32) == "dtype must be float16 or bfloat16, not float32"


def test_says_which_operator_a_torch_npu_lacks():
    with npu_operators({name: f for name, f in REFERENCES.items() if "scatter" not in name}):
        found = operators.capabilities()
    got = why_not(FITTING, family=NpuFamily.ATLAS_A2, dtype=torch.float16, found=found)
    assert got == f"{Operator.SCATTER_CACHE.value}: torch-npu has no such operator"


def test_whatever_it_says_it_can_serve_passes_the_operators_rules(npu):
    """`why_not` and the checks of the call may not disagree: else a request finds out."""
    for heads, kv_heads, dim in [(1, 1, 64), (256, 4, 128), (64, 1, 64), (256, 256, 128), (255, 255, 64)]:
        needs = AttentionNeeds(query_heads=heads, kv_heads=kv_heads, key_dim=dim, value_dim=dim)
        why = why_not(needs, family=NpuFamily.ATLAS_A2, dtype=torch.float16, found=operators.capabilities())
        assert why == ""
        assert off_by(heads, kv_heads, dim, torch.float16, AttentionSpec(scaling=0.1), [[(0, 3)]]) <= 2**-11


def check(function, needs=FITTING):
    """What the check at load says of a chip whose attention does this."""
    with npu_operators({**REFERENCES, "npu::npu_fused_infer_attention_score": function}):
        return find_attention_fault(FusedPagedAttention(CPU), [needs], CpuDevice(), dtype=torch.float16)


def real(*args, **kwargs):
    return REFERENCES["npu::npu_fused_infer_attention_score"](*args, **kwargs)


SMALL = AttentionNeeds(query_heads=4, kv_heads=2, key_dim=64, value_dim=64)


def test_the_check_at_load_passes_a_right_chip():
    assert check(real, SMALL) == ""


def test_the_check_at_load_finds_a_chip_that_stops_at_512_keys():
    def blind(*args, **kwargs):
        lengths = [min(length, 512) if length > 520 else length for length in kwargs.pop("actual_seq_lengths_kv")]
        return real(*args, **kwargs, actual_seq_lengths_kv=lengths)

    assert "differs from the portable one" in check(blind, SMALL)


def test_the_check_at_load_finds_a_chip_that_averages():
    def average(*args, **kwargs):
        return real(*args, **{**kwargs, "scale": 1e-6})

    assert "differs from the portable one" in check(average, SMALL)


def test_the_check_at_load_finds_a_band_that_counts_the_own_key():
    def narrow(*args, **kwargs):
        return real(*args, **{**kwargs, "pre_tokens": kwargs["pre_tokens"] - 1})

    windowed = replace(SMALL, window=4096)
    assert check(real, windowed) == ""
    assert "differs from the portable one" in check(narrow, windowed)


def test_the_check_at_load_finds_a_chip_that_forgets_the_window_when_all_decode():
    def forgetful(*args, **kwargs):
        decodes = kwargs["actual_seq_lengths"][-1] == len(kwargs["actual_seq_lengths"])
        return real(*args, **({**kwargs, "sparse_mode": 3} if decodes else kwargs))

    assert "differs from the portable one" in check(forgetful, replace(SMALL, window=4096))


def test_the_check_at_load_finds_what_is_no_number():
    def broken(*args, **kwargs):
        answer, rest = real(*args, **kwargs)
        return (answer * float("nan") if len(kwargs["actual_seq_lengths"]) == 2 else answer), rest

    assert "differs from the portable one" in check(broken, SMALL)


def test_the_check_at_load_finds_a_chip_without_the_kernel():
    def absent(*args, **kwargs):
        raise RuntimeError("aclnnFusedInferAttentionScoreV3 failed, error code is 561002")

    assert check(absent, SMALL) == "it fails with RuntimeError"


def test_a_query_in_another_dtype_is_refused_by_name(npu):
    pages = Pages(FusedPagedAttention(CPU), [5], kv_heads=2, dim=64, dtype=torch.float16)
    batch = packed([(0, 5)], pages.tables, 128)
    with pytest.raises(OperatorError, match="dtype must be float16 or bfloat16, not float32"):
        pages.tier.attend(torch.zeros(4, 5, 64), pages.pages, batch, AttentionSpec(scaling=1.0))
