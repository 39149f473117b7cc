"""Does a tier attend rightly on this device? Asked at load, against the portable tier in float32 on the CPU.

It finds what a kernel does wrong without an error: on lengths past one block and past 512, on a chunk that continues
what is in the cache, with fewer key and value heads than query heads, inside a window, and when all sequences decode,
which a kernel may treat apart (Ascend reports: vllm-ascend 15503, 13699; its document says that a band counts for
nothing with one query a sequence, in some layouts).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionSpec, AttentionTier
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed_batch import PackedBatch, pack
from tengserve_backend.execution.snapshot import Snapshot, Upload
from tengserve_backend.scheduling.step import ScheduledSequence, Step

_Parts = tuple[tuple[int, int], ...]
# Tokens in the cache before, and new ones: a decode past 512, a chunk behind a prefix, a prompt, a first token.
_MIXED = ((529, 1), (560, 40), (0, 140), (0, 1))
_DECODES = ((599, 1), (130, 1))
# A model's window may be longer than what is tried here; one that bites shows the same faults.
_MAX_WINDOW = 100
# Share of the largest element; a wrong mask or a wrong page is off by about the whole of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class AttentionError:
    """How far a tier is off for one kind of layer.

    Attributes:
        needs: the kind.
        share: largest difference, as a share of the largest element; infinite when something is no number.
    """

    needs: AttentionNeeds
    share: float


@torch.inference_mode()
def attention_errors(
    tier: AttentionTier, needs: Collection[AttentionNeeds], *, dtype: torch.dtype, device: torch.device, upload: Upload
) -> list[AttentionError]:
    """Attend over random keys and values with the tier and with the oracle.

    Raises:
        Exception: whatever the tier raises.
    """
    return [
        AttentionError(kind, max(_share(tier, kind, parts, dtype, device, upload) for parts in (_MIXED, _DECODES)))
        for kind in needs
    ]


def find_attention_fault(
    tier: AttentionTier, needs: Collection[AttentionNeeds], device: DeviceBackend, *, dtype: torch.dtype
) -> str:
    """One clause that says what is wrong with a tier of a device, or "".

    Raises:
        Exception: what says that the device is lost, for then no other tier would work either.
    """
    try:
        errors = attention_errors(tier, needs, dtype=dtype, device=device.torch_device, upload=device.upload)
    except Exception as error:  # whatever a device's kernel raises only means "not this way"
        if device.is_fault(error):
            raise
        return f"it fails with {type(error).__name__}"
    worst = max(errors, key=lambda error: error.share)
    if worst.share > TOLERANCE[dtype]:
        return f"its answer differs from the portable one by {worst.share:.1%} of the largest element"
    return ""


def _share(
    tier: AttentionTier, needs: AttentionNeeds, parts: _Parts, dtype: torch.dtype, device: torch.device, upload: Upload
) -> float:
    generator = torch.Generator().manual_seed(0)
    total = sum(before + new for before, new in parts)
    new = sum(count for _, count in parts)
    keys = torch.randn(total, needs.kv_heads, needs.key_dim, generator=generator)
    values = torch.randn(total, needs.kv_heads, needs.value_dim, generator=generator)
    query = torch.randn(needs.query_heads, new, needs.key_dim, generator=generator)
    softcap = 30.0 if needs.softcap else None
    sinks = torch.randn(needs.query_heads, generator=generator) if needs.sinks else None
    # Whatever factor the model has: with random heads this one gives scores whose softmax has a peak.
    scaling = needs.key_dim**-0.5

    def run(tier: AttentionTier, dtype: torch.dtype, device: torch.device, upload: Upload) -> torch.Tensor:
        spec = AttentionSpec(
            scaling=scaling,
            window=None if needs.window is None else min(needs.window, _MAX_WINDOW),
            chunk=256 if needs.chunks else None,
            softcap=softcap,
            sinks=None if sinks is None else sinks.to(device, dtype),
        )
        cache, batch, everything = _paged(tier, parts, dtype, device, upload)
        pages = cache.layer(0, LayerShape(needs.kv_heads, needs.key_dim, needs.value_dim))
        tier.write(pages, everything, keys.to(device, dtype), values.to(device, dtype))
        return tier.attend(query.to(device, dtype), pages, batch, spec).to("cpu", torch.float32)

    # Rounding the inputs is not the tier's fault.
    keys, values, query = (tensor.to(dtype).float() for tensor in (keys, values, query))
    expected = run(PortableAttention(), torch.float32, torch.device("cpu"), lambda host: host)
    got = run(tier, dtype, device, upload)
    share = float((got - expected).abs().max() / expected.abs().max())
    # NaN would lose against any number when the worst is looked for.
    return math.inf if math.isnan(share) else share


def _paged(
    tier: AttentionTier, parts: _Parts, dtype: torch.dtype, device: torch.device, upload: Upload
) -> tuple[PagedKVCache, PackedBatch, PackedBatch]:
    """A cache, the batch of the new tokens, and a batch that writes everything; blocks in no order."""
    size = tier.block_size
    lengths = [before + new for before, new in parts]
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [tuple(order.pop() for _ in range(count)) for count in counts]
    cache = PagedKVCache(total_blocks=sum(counts), block_size=size, dtype=dtype, device=device)

    def batch(parts: Sequence[tuple[int, int]]) -> PackedBatch:
        step = Step(
            0,
            tuple(
                ScheduledSequence(index, start, (0,) * count, table, samples=False)
                for index, ((start, count), table) in enumerate(zip(parts, tables, strict=True))
            ),
        )
        snapshot = Snapshot()
        layout = pack(step, snapshot, block_size=size)
        return layout.on(snapshot.upload(upload))

    return cache, batch(parts), batch([(0, length) for length in lengths])
