"""Blocks as numbers."""

import pytest

from tengserve_backend.kvcache.block_pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.free, pool.used) == (0, 4)
    pool.release(first)
    assert (pool.free, pool.used) == (3, 1)
    pool.check(second)


def test_more_than_is_free_is_refused_whole():
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="3 blocks were asked for, 2 are free"):
        pool.allocate(3)
    assert pool.free == 2


def test_a_double_free_shows_at_once():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks)


@pytest.mark.parametrize(("owned", "complaint"), [([], "in use but"), ([0, 0], "two sequences"), ([1], "in use but")])
def test_the_check_finds_lost_and_shared_blocks(owned, complaint):
    pool = BlockPool(2, 16)
    assert pool.allocate(1) == [0]
    with pytest.raises(RuntimeError, match=complaint):
        pool.check(owned)


def test_blocks_for_rounds_up():
    pool = BlockPool(2, 16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
