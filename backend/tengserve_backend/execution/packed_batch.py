"""A step as the tensors that one forward reads: sequences end to end in one row, no padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tengserve_backend.execution.snapshot import Piece, Snapshot, Uploaded
from tengserve_backend.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence's part lies in the packed row.

    Attributes:
        offset, count: its tokens are at [offset, offset + count) of the row.
        context: tokens of the sequence in the cache after the step; its queries are the last `count` of them.
    """

    offset: int
    count: int
    context: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Inputs of one forward. What is no tensor is known on the host, so reading it never waits for the device.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T]; position of each token in its own sequence.
        slots: int64 [T]; cache slot that each token's key and value go to.
        slots32: the same in int32.
        block_table: int32 [B, most blocks of a sequence]; the cache blocks of each sequence in order, then zeros.
        spans: one a sequence, in the order of the row.
        query_ends: where each sequence's tokens end in the row; the last is T.
        contexts: tokens of each sequence in the cache after the step.
        logit_rows: int64 [L]; positions in the row whose logits are wanted: all of a part that scores its prompt, the
            last of another part that samples.
        block_size: tokens of a cache block.
        wants_all: whether logit_rows are all of the row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    slots32: torch.Tensor
    block_table: torch.Tensor
    spans: tuple[Span, ...]
    query_ends: list[int]
    contexts: list[int]
    logit_rows: torch.Tensor
    block_size: int
    wants_all: bool = False
    _context_slots: list[torch.Tensor] = field(default_factory=list)

    def context_slots(self, index: int) -> torch.Tensor:
        """int32 [context]: cache slots of all tokens of a sequence, in order. Made once a step, for all layers."""
        if not self._context_slots:
            # Of the blocks that are used: the table is as wide as the longest sequence, whatever the others have.
            used = [-(-context // self.block_size) for context in self.contexts]
            blocks = torch.cat([row[:count] for row, count in zip(self.block_table, used, strict=True)])
            within = torch.arange(self.block_size, dtype=torch.int32, device=self.block_table.device)
            slots = (blocks.unsqueeze(-1) * self.block_size + within).flatten()
            rows = slots.split_with_sizes([count * self.block_size for count in used])
            self._context_slots.extend(row[:context] for row, context in zip(rows, self.contexts, strict=True))
        return self._context_slots[index]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A packed batch whose tensors are still part of a snapshot. Attributes as in PackedBatch."""

    input_ids: Piece
    position_ids: Piece
    slots: Piece
    block_table: Piece
    spans: tuple[Span, ...]
    logit_rows: Piece
    block_size: int

    def on(self, uploaded: Uploaded) -> PackedBatch:
        """The batch, on the device."""
        return PackedBatch(
            input_ids=uploaded.int64(self.input_ids),
            position_ids=uploaded.int64(self.position_ids),
            slots=uploaded.int64(self.slots),
            slots32=uploaded.int32(self.slots),
            block_table=uploaded.int32(self.block_table),
            spans=self.spans,
            query_ends=[span.offset + span.count for span in self.spans],
            contexts=[span.context for span in self.spans],
            logit_rows=uploaded.int64(self.logit_rows),
            block_size=self.block_size,
            wants_all=self.logit_rows.shape == self.slots.shape,
        )


def pack(step: Step, snapshot: Snapshot, *, block_size: int) -> BatchLayout:
    """Add the tensors of a step to its snapshot."""
    ids: list[int] = []
    logit_rows: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    used = [-(-(part.start + len(part.token_ids)) // block_size) for part in step.sequences]
    width = max(used)
    table: list[int] = []
    for part, blocks in zip(step.sequences, used, strict=True):
        context = part.start + len(part.token_ids)
        spans.append(Span(len(ids), len(part.token_ids), context))
        table += part.blocks[:blocks]
        table += (0,) * (width - blocks)
        positions.extend(range(part.start, context))
        for block in range(part.start // block_size, blocks):
            first = block * block_size
            begin, end = max(part.start, first), min(context, first + block_size)
            slot = part.blocks[block] * block_size - first
            slots.extend(range(slot + begin, slot + end))
        ids.extend(part.token_ids)
        if part.scores_prompt:
            logit_rows.extend(range(len(ids) - len(part.token_ids), len(ids)))
        elif part.samples:
            logit_rows.append(len(ids) - 1)
    return BatchLayout(
        input_ids=snapshot.add_integers(ids, shape=(1, len(ids))),
        position_ids=snapshot.add_integers(positions, shape=(1, len(ids))),
        slots=snapshot.add_integers(slots),
        block_table=snapshot.add_integers(table, shape=(len(used), width)),
        spans=tuple(spans),
        logit_rows=snapshot.add_integers(logit_rows),
        block_size=block_size,
    )
