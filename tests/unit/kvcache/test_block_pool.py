"""Blocks as numbers."""

import pytest

from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.kvcache.content import BlockContent, PrefixContents


def contents(*tokens: int) -> list[BlockContent]:
    return list(PrefixContents(2).up_to(tokens, len(tokens)))


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.free, pool.used) == (0, 4)
    pool.release(first)
    assert (pool.free, pool.used) == (3, 1)
    pool.check(second)


def test_more_than_is_available_is_refused_whole():
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="3 blocks were asked for, 2 are available"):
        pool.allocate(3)
    assert pool.free == 2


def test_a_double_free_shows_at_once():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks)


@pytest.mark.parametrize("owned", [[], [0, 0], [1]])
def test_the_check_finds_lost_and_shared_blocks(owned):
    pool = BlockPool(2, 16)
    assert pool.allocate(1) == [0]
    pool.check([0])
    with pytest.raises(RuntimeError, match="users, but"):
        pool.check(owned)


def test_blocks_for_rounds_up():
    pool = BlockPool(2, 16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_published_content_is_found_by_its_whole_prefix_only():
    pool = BlockPool(4, 2)
    known = contents(1, 2, 3, 4)
    blocks = pool.allocate(2)
    for block, content in zip(blocks, known, strict=True):
        pool.publish(block, content)
    assert pool.match(known) == blocks
    assert pool.match(contents(1, 2, 9, 9)) == blocks[:1]
    assert pool.match(contents(9, 9, 3, 4)) == []
    assert pool.match(contents(3, 4)) == []


def test_a_hash_collision_is_no_hit():
    pool = BlockPool(4, 2)
    (content,) = contents(1, 2)
    (block,) = pool.allocate(1)
    pool.publish(block, content)
    assert pool.match([BlockContent(content.digest, b"", (7, 8))]) == []


def test_a_shared_block_is_used_until_its_last_user_gives_it_back():
    pool = BlockPool(4, 2)
    known = contents(1, 2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], known[0])
    pool.share(pool.match(known))
    pool.check(blocks * 2)
    pool.release(blocks)
    assert (pool.used, pool.cached) == (1, 0)
    pool.release(blocks)
    assert (pool.used, pool.cached) == (0, 1)


def test_the_least_recently_used_content_goes_first_and_a_tail_before_its_beginning():
    pool = BlockPool(4, 2)
    old, new = contents(1, 2, 3, 4), contents(5, 6, 7, 8)
    for known in (old, new):
        blocks = pool.allocate(2)
        for block, content in zip(blocks, known, strict=True):
            pool.publish(block, content)
        pool.release(blocks)
    assert (pool.free, pool.cached) == (0, 4)
    pool.share(used := pool.match(old))
    pool.release(used)
    pool.allocate(1)
    assert len(pool.match(new)) == 1
    pool.allocate(2)
    assert (len(pool.match(new)), len(pool.match(old))) == (0, 1)


def test_content_known_already_keeps_its_first_block():
    pool = BlockPool(4, 2)
    known = contents(1, 2)
    first, second = pool.allocate(2)
    pool.publish(first, known[0])
    pool.publish(second, known[0])
    assert pool.match(known) == [first]
    pool.release([second])
    assert (pool.free, pool.cached) == (3, 0)
