"""The blocks of one engine's KV cache, as numbers: who uses them, and what the idle ones still hold.

```
free    [ never used, or content unknown ]          handed out first
cached  [ nobody uses it, content known  ]          handed out when no free one is left, least recently used first
used    [ one sequence, or several that share it ]
```

A block whose every slot is computed can be published under its content: its tokens and all before them. A sequence that
begins with the same tokens takes it instead of computing them again. Contents are found by a hash of the whole prefix,
and the token ids are compared on a hit, so a collision cannot give a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tengserve_backend.kvcache.content import BlockContent


@dataclass(slots=True)
class _Block:
    """users: sequences that own it; content: what it was published under."""

    users: int = 0
    content: BlockContent | None = None


class BlockPool:
    """Hands out block numbers 0 .. total - 1 and takes them back.

    Every block is free, cached or used at any time. The pool refuses to hand out what it has not and to take back what
    nobody uses, so a leak or a double free shows where it happens.

    Args:
        total: number of blocks, at least 1.
        block_size: tokens a block holds, at least 1.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total} blocks of {block_size}")
        self.total = total
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(total)]
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and whose content may be used again."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that sequences own."""
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def holding(self) -> list[int]:
        """Blocks that hold something which may be read again: those in use and the cached ones."""
        return [block for block, entry in enumerate(self._blocks) if entry.users or entry.content is not None]

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks with no content, to one user; ask `available` first.

        Raises:
            ValueError: more than are available; nothing was handed out.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks were asked for, {self.available} are available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._blocks[block].users = 1
            blocks.append(block)
        return blocks

    def match(self, contents: Sequence[BlockContent]) -> list[int]:
        """The published blocks of the longest known prefix, without taking them."""
        blocks = []
        for content in contents:
            block = self._published.get(content.digest)
            if block is None or self._blocks[block].content != content:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take blocks that `match` has just found, each for one more user."""
        for block in blocks:
            self._cached.pop(block, None)
            self._blocks[block].users += 1

    def cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are not used now, so that sharing them leaves fewer available."""
        return sum(self._blocks[block].users == 0 for block in blocks)

    def publish(self, block: int, content: BlockContent) -> None:
        """Say what a used block holds, now that all its slots are computed. The first to say so keeps the content."""
        entry = self._blocks[block]
        if entry.content is None and content.digest not in self._published:
            entry.content = content
            self._published[content.digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """One user gives blocks back, in their order. The last ones are evicted first: a prefix outlives its tail.

        Raises:
            ValueError: nobody uses one of them.
        """
        for block in reversed(blocks):
            entry = self._blocks[block]
            if entry.users < 1:
                raise ValueError(f"block {block} was given back but is not in use")
            entry.users -= 1
            if entry.users == 0:
                if entry.content is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def check(self, owned: Iterable[int]) -> None:
        """Prove conservation: free + cached + used = total, and each block has as many users as sequences own it.

        Args:
            owned: the blocks of every sequence, one after the other.

        Raises:
            RuntimeError: a block is lost, owned without having been handed out, or counted twice.
        """
        users = [0] * self.total
        for block in owned:
            users[block] += 1
        for block, entry in enumerate(self._blocks):
            if entry.users != users[block]:
                raise RuntimeError(f"cache block {block} counts {entry.users} users, but {users[block]} own it")
        idle = [*self._free, *self._cached]
        if len(set(idle)) != len(idle) or any(self._blocks[block].users for block in idle):
            raise RuntimeError("a cache block is idle twice, or idle and in use")
        in_use = sum(count > 0 for count in users)
        if len(idle) + in_use != self.total:
            raise RuntimeError(
                f"{self.free} free + {self.cached} cached + {in_use} used cache blocks are not {self.total}"
            )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        entry = self._blocks[block]
        if entry.content is not None:
            del self._published[entry.content.digest]
            entry.content = None
        return block
