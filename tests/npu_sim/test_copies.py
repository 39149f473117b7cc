"""Copies are counted, and asynchronous ones happen as late as a real device may do them: who reads too early, or writes
again too early, finds out."""

from __future__ import annotations

import pytest
import torch

from npu_sim.simulator.state import State


def _pinned(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).pin_memory()


def _upload(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="npu").copy_(source, non_blocking=True)


def test_copies_and_waits_are_counted(npu: State) -> None:
    there = torch.arange(4, dtype=torch.int32).npu()
    assert (npu.host_to_device, npu.device_to_host, npu.copied_bytes[1]) == (1, 0, 16)
    before = npu.syncs
    assert there.tolist() == [0, 1, 2, 3]
    assert (npu.host_to_device, npu.device_to_host, npu.copied_bytes[2]) == (1, 1, 16)
    assert npu.syncs > before


def test_a_kernel_is_a_launch_and_no_wait(npu: State) -> None:
    there = torch.ones(4, device="npu")
    npu.reset_counters()
    there + there
    assert (npu.launches, npu.syncs, npu.host_to_device, npu.device_to_host) == (1, 0, 0, 0)


def test_reading_one_number_is_one_copy(npu: State) -> None:
    there = torch.ones(4, device="npu").sum()
    npu.reset_counters()
    assert there.item() == 4
    assert npu.device_to_host == 1


def test_a_staging_buffer_that_is_used_again_too_early_spoils_what_was_sent(npu: State) -> None:
    buffer = _pinned(1, 2, 3)
    there = _upload(buffer)
    buffer.fill_(9)
    assert there.tolist() == [9, 9, 9]


def test_an_event_makes_it_safe(npu: State) -> None:
    buffer = _pinned(1, 2, 3)
    there = _upload(buffer)
    sent = torch.npu.Event()
    sent.record()
    sent.synchronize()
    buffer.fill_(9)
    assert there.tolist() == [1, 2, 3]


def test_a_kernel_on_the_same_stream_sees_what_was_sent_before_it(npu: State) -> None:
    buffer = _pinned(1, 2, 3)
    doubled = _upload(buffer) * 2
    buffer.fill_(9)
    assert doubled.tolist() == [2, 4, 6]


@pytest.mark.parametrize("defer", [0, 1])
def test_copies_are_deferred_when_asked(npu: State, defer: int) -> None:
    npu.defer_copies = defer
    _upload(_pinned(1, 2, 3))
    torch.npu.current_stream().synchronize()
    assert npu.deferred_copies == defer


def test_pageable_memory_is_taken_at_the_call(npu: State) -> None:
    buffer = torch.tensor([1, 2, 3], dtype=torch.int32)
    there = _upload(buffer)
    buffer.fill_(9)
    assert there.tolist() == [1, 2, 3]


def test_a_download_that_nobody_waits_for_has_not_arrived(npu: State) -> None:
    there = torch.tensor([1, 2, 3], dtype=torch.int32).npu()
    here = _pinned(7, 7, 7)
    here.copy_(there, non_blocking=True)
    assert here.tolist() == [7, 7, 7]
    torch.npu.current_stream().synchronize()
    assert here.tolist() == [1, 2, 3]


def test_another_stream_that_does_not_wait_reads_too_early(npu: State) -> None:
    buffer = _pinned(1, 2, 3)
    there = torch.zeros(3, dtype=torch.int32, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        there.copy_(buffer, non_blocking=True)
    assert (there + 0).tolist() == [0, 0, 0]
    torch.npu.current_stream().wait_stream(side)
    assert (there + 0).tolist() == [1, 2, 3]
