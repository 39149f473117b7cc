"""A step as the tensors that one forward reads: sequences end to end in one row, no padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tengserve_backend.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence's part lies in the packed row.

    Attributes:
        offset, count: its tokens are at [offset, offset + count) of the row.
        context: tokens of the sequence in the cache after the step; its queries are the last `count` of them.
        slots: int64 [context], the cache slot of each of these tokens, in order.
    """

    offset: int
    count: int
    context: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Inputs of one forward.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T]; position of each token in its own sequence.
        slots: int64 [T]; cache slot that each token's key and value go to.
        spans: one a sequence, in the order of the row.
        logit_rows: int64 [L]; positions in the row whose logits are wanted: all of a part that scores its prompt, the
            last of another part that samples.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    spans: tuple[Span, ...]
    logit_rows: torch.Tensor


def pack(step: Step, *, block_size: int, device: torch.device) -> PackedBatch:
    """Build the tensors of a step. Everything goes to the device in one copy of one host buffer."""
    ids: list[int] = []
    logit_rows: list[int] = []
    positions: list[np.ndarray] = []
    contexts: list[np.ndarray] = []
    within = np.arange(block_size, dtype=np.int64)
    for part in step.sequences:
        context = part.start + len(part.token_ids)
        blocks = np.asarray(part.blocks, dtype=np.int64)
        contexts.append((blocks[:, None] * block_size + within[None, :]).reshape(-1)[:context])
        positions.append(np.arange(part.start, context, dtype=np.int64))
        ids.extend(part.token_ids)
        if part.scores_prompt:
            logit_rows.extend(range(len(ids) - len(part.token_ids), len(ids)))
        elif part.samples:
            logit_rows.append(len(ids) - 1)
    total = len(ids)
    host = np.concatenate(
        [
            np.asarray(ids, dtype=np.int64),
            *positions,
            *(slots[len(slots) - len(part.token_ids) :] for slots, part in zip(contexts, step.sequences, strict=True)),
            np.asarray(logit_rows, dtype=np.int64),
            *contexts,
        ]
    )
    packed = torch.from_numpy(host).to(device)
    spans: list[Span] = []
    offset, cursor = 0, 3 * total + len(logit_rows)
    for slots, part in zip(contexts, step.sequences, strict=True):
        count = len(part.token_ids)
        spans.append(Span(offset, count, len(slots), packed[cursor : cursor + len(slots)]))
        offset += count
        cursor += len(slots)
    return PackedBatch(
        input_ids=packed[:total].unsqueeze(0),
        position_ids=packed[total : 2 * total].unsqueeze(0),
        slots=packed[2 * total : 3 * total],
        spans=tuple(spans),
        logit_rows=packed[3 * total : 3 * total + len(logit_rows)],
    )
