"""Where packed weights lie: side by side, and the system has the memory again when they are gone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from support.cpu_operators import cpu_operators

MIB = 2**20
STATM = Path("/proc/self/statm")

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux's /proc")


def resident() -> int:
    """Bytes."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def weight(mib: int) -> torch.Tensor:
    return torch.full((mib * MIB // 4096, 1024), 0.5)


def answers(packed: torch.Tensor) -> bool:
    out = packed.shape[0] * 32
    return bool((cpu_operators().linear(torch.ones(1, 1024), packed, None, 1024, out) == 512).all())


def test_memory_of_weights_goes_back_with_the_last_of_them() -> None:
    source = weight(5)
    ops = cpu_operators()
    before = resident()
    packed = [ops.pack_linear(source) for _ in range(20)]
    assert resident() - before > 90 * MIB
    assert all(answers(each) for each in packed)
    packed = packed[3:4]
    assert resident() - before < 70 * MIB
    assert answers(packed[0])
    packed.clear()
    assert resident() - before < 20 * MIB


def test_memory_goes_back_under_others_that_stay() -> None:
    source = weight(5)
    ops = cpu_operators()
    before = resident()
    kept, dropped = [], []
    for _ in range(10):
        dropped.append(ops.pack_linear(source))
        kept.append(ops.pack_linear(source))
    dropped.clear()
    assert resident() - before < 70 * MIB
    assert all(answers(each) for each in kept)


def test_weights_that_were_tried_and_dropped_leave_their_place() -> None:
    source = weight(3)
    ops = cpu_operators()
    kept = ops.pack_linear(source)
    before = resident()
    for _ in range(100):
        assert answers(ops.pack_linear(source))
    assert resident() - before < 20 * MIB
    assert answers(kept)


def test_a_weight_larger_than_a_region_has_one() -> None:
    ops = cpu_operators()
    small, large, after = ops.pack_linear(weight(1)), ops.pack_linear(weight(70)), ops.pack_linear(weight(1))
    assert answers(small)
    assert answers(large)
    assert answers(after)


def test_memory_that_was_used_before_is_zero_where_nothing_is_packed() -> None:
    ops = cpu_operators()
    kept = ops.pack_linear(weight(1))
    del kept
    # 33 columns fill two panels, and 1000 inputs of bfloat16 are 1024.
    narrow = torch.full((33, 1000), 0.5).bfloat16()
    packed = ops.pack_linear(narrow)
    assert not packed[1, :, 2:].any()
    assert not packed[:, 1000:].any()
