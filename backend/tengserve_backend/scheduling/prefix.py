"""Prefix reuse: a sequence takes computed blocks that begin like it, and tells what its own blocks hold."""

from __future__ import annotations

from dataclasses import dataclass

from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.kvcache.content import PrefixContents
from tengserve_backend.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Known:
    """contents: of the sequence's full blocks; published: how many of its blocks the pool has been told of."""

    contents: PrefixContents
    published: int = 0


class PrefixSharing:
    """Finds and publishes blocks of one pool.

    Args:
        pool: the pool.
        enabled: False finds and publishes nothing.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._known: dict[int, _Known] = {}
        self.asked_tokens = 0
        self.hit_tokens = 0

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a sequence that has none yet; at least one token is left to compute.

        None for a sequence whose prompt is scored: a token that is found has no logits.
        """
        if not self._enabled:
            return []
        known = self._known.setdefault(sequence.seq_id, _Known(PrefixContents(self._pool.block_size)))
        if sequence.scores_prompt:
            return []
        return self._pool.match(known.contents.up_to(sequence.token_ids, len(sequence.token_ids) - 1))

    def started(self, sequence: Sequence) -> None:
        """The sequence starts, or starts again, with `computed` tokens that it found."""
        if not self._enabled:
            return
        self._known[sequence.seq_id].published = sequence.computed // self._pool.block_size
        self.asked_tokens += len(sequence.token_ids)
        self.hit_tokens += sequence.computed

    def publish(self, sequence: Sequence) -> None:
        """Tell the pool of the blocks that have become full since the last time."""
        known = self._known.get(sequence.seq_id)
        if known is None or sequence.computed // self._pool.block_size == known.published:
            return
        contents = known.contents.up_to(sequence.token_ids, sequence.computed)
        for index in range(known.published, len(contents)):
            self._pool.publish(sequence.blocks[index], contents[index])
        known.published = len(contents)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone."""
        self._known.pop(sequence.seq_id, None)
