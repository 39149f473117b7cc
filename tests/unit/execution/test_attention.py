"""The portable tier against attention written out."""

from __future__ import annotations

import pytest
import torch

from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed_batch import PackedBatch, pack
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.scheduling.step import ScheduledSequence, Step

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
CPU = torch.device("cpu")


def packed(step: Step, block_size: int) -> PackedBatch:
    snapshot = Snapshot()
    return pack(step, snapshot, block_size=block_size).on(snapshot.upload(lambda host: host))


def written_out(query, keys, values, spec: AttentionSpec):
    """One sequence, whole, in float64. query [H, n, D], keys [K, n, D], values [K, n, V] -> [H, n, V]."""
    out = torch.zeros(HEADS, query.shape[1], VALUE_DIM, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        for position in range(query.shape[1]):
            # Both may be set; the later of the two bounds holds.
            by_window = 0 if spec.window is None else max(0, position - spec.window + 1)
            by_chunk = 0 if spec.chunk is None else position - position % spec.chunk
            first = max(by_window, by_chunk)
            scores = keys[kv, first : position + 1].double() @ query[head, position].double() * spec.scaling
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: position + 1 - first]
            out[head, position] = weights @ values[kv, first : position + 1].double()
    return out


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scaling=0.3),
        AttentionSpec(scaling=0.3, window=5),
        AttentionSpec(scaling=0.3, chunk=7),
        AttentionSpec(scaling=0.3, chunk=7, window=5),
        AttentionSpec(scaling=0.9, softcap=1.5),
        AttentionSpec(scaling=0.9, softcap=1.5, window=3),
        AttentionSpec(scaling=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        AttentionSpec(scaling=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), window=4),
    ],
    ids=str,
)
def test_chunks_and_decodes_over_scattered_pages_equal_the_formula(spec):
    generator = torch.Generator().manual_seed(5)
    lengths = {0: 37, 1: 21}
    tables = {0: (9, 2, 7), 1: (4, 0)}
    tensors = {
        seq_id: tuple(
            torch.randn(heads, length, dim, generator=generator)
            for heads, dim in ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM))
        )
        for seq_id, length in lengths.items()
    }
    tier = PortableAttention()
    cache = PagedKVCache(total_blocks=10, block_size=tier.block_size, dtype=torch.float32, device=CPU)
    got = {seq_id: torch.zeros(HEADS, length, VALUE_DIM) for seq_id, length in lengths.items()}
    schedule = [{0: 16, 1: 3}, {0: 1, 1: 1}, {0: 19, 1: 1}, {1: 16}, {0: 1}]
    computed = dict.fromkeys(lengths, 0)
    for number, counts in enumerate(schedule):
        step = Step(
            number,
            tuple(
                ScheduledSequence(s, computed[s], (0,) * count, tables[s], samples=False) for s, count in counts.items()
            ),
        )
        batch = packed(step, tier.block_size)
        query, key, value = (
            torch.cat([tensors[s][i][:, computed[s] : computed[s] + n] for s, n in counts.items()], 1) for i in range(3)
        )
        pages = cache.layer(0, LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM))
        tier.write(pages, batch, key.transpose(0, 1), value.transpose(0, 1))
        out = tier.attend(query, pages, batch, spec)
        for span, (seq_id, count) in zip(batch.spans, counts.items(), strict=True):
            rows = out[span.offset : span.offset + span.count].transpose(0, 1)
            got[seq_id][:, computed[seq_id] : computed[seq_id] + count] = rows
            computed[seq_id] += count
    assert computed == lengths
    for seq_id, (query, keys, values) in tensors.items():
        torch.testing.assert_close(got[seq_id].double(), written_out(query, keys, values, spec), atol=2e-6, rtol=2e-5)


def test_one_long_sequence_costs_the_others_no_slots():
    long, short, block_size = 4096, 63, 16
    parts = [ScheduledSequence(0, long - 1, (1,), tuple(range(long // block_size)), samples=True)]
    parts += [ScheduledSequence(1 + n, 0, (1,), (long // block_size + n,), samples=True) for n in range(short)]
    batch = packed(Step(0, tuple(parts)), block_size)
    assert batch.context_slots(0).tolist() == list(range(long))
    assert batch.context_slots(short).tolist() == [long + (short - 1) * block_size]
    # All slots are in one storage: no more than each sequence's blocks have.
    assert batch.context_slots(0).untyped_storage().nbytes() == 4 * (long + short * block_size)


def test_a_packed_batch_says_where_everything_goes():
    step = Step(
        0,
        (
            ScheduledSequence(7, 3, (50, 51), (2, 0), samples=True),
            ScheduledSequence(8, 0, (60,), (1,), samples=False),
            ScheduledSequence(9, 4, (70,), (3, 5), samples=True),
        ),
    )
    batch = packed(step, 4)
    assert batch.input_ids.tolist() == [[50, 51, 60, 70]]
    assert batch.position_ids.tolist() == [[3, 4, 0, 4]]
    assert batch.slots.tolist() == [11, 0, 4, 20]
    assert batch.logit_rows.tolist() == [1, 3]
    assert batch.slots32.tolist() == batch.slots.tolist()
    assert batch.block_table.tolist() == [[2, 0], [1, 0], [3, 5]]
    assert batch.query_ends == [2, 3, 4]
    assert batch.contexts == [5, 1, 5]
    assert [batch.context_slots(index).tolist() for index in range(3)] == [
        [8, 9, 10, 11, 0],
        [4],
        [12, 13, 14, 15, 20],
    ]
