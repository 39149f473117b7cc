"""The blocks of one engine's KV cache, as numbers."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0 .. total - 1 and takes them back.

    Every block is either free or used, at any time; the pool refuses to hand out what it has not and to take back
    what it did not hand out, so a leak or a double free shows where it happens.

    Args:
        total: number of blocks, at least 1.
        block_size: tokens a block holds, at least 1.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total} blocks of {block_size}")
        self.total = total
        self.block_size = block_size
        self._free = list(range(total - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks handed out."""
        return len(self._used)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks; ask `free` first.

        Raises:
            ValueError: more than are free; nothing was handed out.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks were asked for, {len(self._free)} are free")
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        self._used.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: a block that is not in use.
        """
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} was given back but is not in use")
            self._used.remove(block)
            self._free.append(block)

    def check(self, owned: Iterable[int]) -> None:
        """Prove conservation: the used blocks are exactly those that sequences own, each once.

        Raises:
            RuntimeError: a block is lost, shared or owned without having been handed out.
        """
        owned_list = list(owned)
        if len(owned_list) != len(set(owned_list)):
            raise RuntimeError("a cache block belongs to two sequences")
        if set(owned_list) != self._used:
            raise RuntimeError(f"{len(self._used)} cache blocks are in use but sequences own {len(owned_list)}")
        if len(self._free) + len(self._used) != self.total:
            raise RuntimeError(f"{len(self._free)} free + {len(self._used)} used blocks are not {self.total}")
