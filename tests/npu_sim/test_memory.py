"""Memory of the simulated device runs out, and is got back."""

from __future__ import annotations

import pytest
import torch

from npu_sim.simulator.process import run_simulated
from npu_sim.simulator.state import State

MIB = 1 << 20


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="npu")


def test_more_than_there_is_cannot_be_had(npu: State) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        _bytes(2048 * MIB)
    assert npu.malloc_refusals > 0
    assert _bytes(64 * MIB).shape == (64 * MIB,)


def test_memory_that_is_freed_can_be_had_again(npu: State) -> None:
    torch.npu.empty_cache()
    for _ in range(4):
        _bytes(700 * MIB)
    torch.npu.empty_cache()
    assert npu.peak_bytes[0] < 1024 * MIB
    assert npu.used_bytes[0] < 700 * MIB


def test_fresh_memory_holds_no_numbers(npu: State) -> None:
    torch.npu.empty_cache()
    assert torch.empty(32 * MIB, dtype=torch.float16, device="npu").isnan().all()


def test_an_allocation_that_fails_once_is_tried_again_by_the_wheel(npu: State) -> None:
    torch.npu.empty_cache()
    npu.malloc_failures = 1
    assert _bytes(64 * MIB).shape == (64 * MIB,)
    assert npu.malloc_refusals == 1


def test_allocations_fail_from_the_nth_on(npu: State) -> None:
    torch.npu.empty_cache()
    npu.malloc_passes, npu.malloc_failures = 1, -1
    first = _bytes(64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        _bytes(64 * MIB)
    npu.malloc_failures = 0
    assert _bytes(64 * MIB).shape == first.shape


def test_what_is_in_the_cache_is_handed_out_when_nothing_else_is_left(npu: State) -> None:
    torch.npu.empty_cache()
    _bytes(64 * MIB)
    with npu.no_more_memory():
        assert _bytes(64 * MIB).shape == (64 * MIB,)
        with pytest.raises(torch.OutOfMemoryError):
            _bytes(128 * MIB)
    assert _bytes(128 * MIB).shape == (128 * MIB,)


def test_a_result_that_does_not_fit_is_out_of_memory_too(npu: State) -> None:
    left = _bytes(600 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        left + 1


def test_segments_that_grow_are_accounted_for() -> None:
    printed = run_simulated(
        """
        import torch
        from npu_sim.simulator.state import own
        kept = torch.zeros(100 << 20, dtype=torch.uint8, device="npu")
        more = torch.ones(200 << 20, dtype=torch.uint8, device="npu")
        print(int(kept.sum()), int(more[-5:].sum()), own().used_bytes[0] >= 300 << 20)
        try:
            torch.zeros(1 << 30, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError:
            print("refused")
        del kept, more
        torch.npu.empty_cache()
        print(own().used_bytes[0] < 100 << 20)
        """,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    assert printed.split("\n")[-4:-1] == ["0 5 True", "refused", "True"]
