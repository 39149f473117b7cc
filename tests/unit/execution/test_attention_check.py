"""The check that a tier has to pass before it serves anything."""

from __future__ import annotations

import pytest
import torch

from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.execution.attention.check import find_attention_fault
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch

NEEDS = [
    AttentionNeeds(query_heads=4, kv_heads=2, key_dim=16, value_dim=16),
    AttentionNeeds(query_heads=4, kv_heads=4, key_dim=16, value_dim=8, window=100),
    AttentionNeeds(query_heads=4, kv_heads=1, key_dim=16, value_dim=16, softcap=True, sinks=True, chunks=True),
]


def fault(tier, dtype=torch.float32) -> str:
    return find_attention_fault(tier, NEEDS, CpuDevice(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 128])
def test_a_right_tier_passes_in_every_dtype(dtype, block_size):
    assert fault(PortableAttention(block_size), dtype) == ""


class Blind(PortableAttention):
    """Sees no key past a position, as a kernel with a mask of too few dimensions does."""

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        out = super().attend(query, pages, batch, spec)
        for span in batch.spans:
            if span.context > 512:
                out[span.offset : span.offset + span.count] *= 0.5
        return out


class Shifted(PortableAttention):
    """Writes a token beside its slot."""

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(pages, batch, key.roll(1, 0), value)


class Broken(PortableAttention):
    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        raise RuntimeError("561002")


class NotANumber(PortableAttention):
    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        return super().attend(query, pages, batch, spec) * float("nan")


@pytest.mark.parametrize("tier", [Blind(), Shifted(), NotANumber()], ids=lambda tier: type(tier).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tier_that_answers_wrongly_is_found(tier, dtype):
    assert "differs from the portable one" in fault(tier, dtype)


def test_a_tier_that_raises_is_found():
    assert fault(Broken()) == "it fails with RuntimeError"
