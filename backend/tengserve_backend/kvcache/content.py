"""What a full block holds: its tokens, and by a hash all tokens before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Content of one full block.

    Attributes:
        digest: of the whole prefix that ends with this block.
        parent: digest of the block before, b"" for the first.
        tokens: the token ids in the block.
    """

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PrefixContents:
    """The contents of a growing sequence's full blocks, each hashed once.

    Args:
        block_size: tokens a block holds.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[BlockContent] = []

    def up_to(self, token_ids: Sequence[int], tokens: int) -> Sequence[BlockContent]:
        """Contents of the blocks that the first `tokens` token ids fill; token ids only ever grow at the end."""
        full = tokens // self._block_size
        for index in range(len(self._contents), full):
            parent = self._contents[-1].digest if self._contents else b""
            block = tuple(token_ids[index * self._block_size : (index + 1) * self._block_size])
            digest = hashlib.blake2b(array("q", block).tobytes(), digest_size=_DIGEST_BYTES, key=parent).digest()
            self._contents.append(BlockContent(digest, parent, block))
        return self._contents[:full]
