"""The operators of the simulated device: torch's own values, and an honest record of what ran where."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from npu_sim.simulator.log import record
from npu_sim.simulator.state import State


def test_results_are_those_of_the_host(npu: State) -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    there = torch.softmax(left.npu() @ right.npu(), dim=-1)
    assert there.device == torch.device("npu", 0)
    assert torch.equal(there.cpu(), torch.softmax(left @ right, dim=-1))


def test_operators_in_place_and_views_share_memory(npu: State) -> None:
    there = torch.zeros(2, 3, device="npu")
    there[1].add_(1)
    there.t()[0] += 5
    assert there.tolist() == [[5, 0, 0], [6, 1, 1]]


def test_a_result_may_be_written_into_a_tensor_that_has_to_grow(npu: State) -> None:
    there = torch.empty(0, device="npu")
    torch.add(torch.ones(3, device="npu"), 1, out=there)
    assert there.tolist() == [2, 2, 2]


def test_tensors_of_host_and_device_do_not_mix(npu: State) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="npu") + torch.ones(3)
    assert (torch.ones(3, device="npu") + torch.tensor(1.0)).tolist() == [2, 2, 2]


def test_draws_repeat_with_the_seed_and_go_on_without(npu: State) -> None:
    generator = torch.Generator(device="npu").manual_seed(3)
    first = torch.rand(4, device="npu", generator=generator)
    second = torch.rand(4, device="npu", generator=generator)
    generator.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(4, device="npu", generator=generator).cpu())
    assert not torch.equal(first.cpu(), second.cpu())


def test_the_log_has_all_threads(npu: State) -> None:
    there = torch.ones(3, device="npu")

    def work() -> None:
        torch.npu.set_device(0)
        there.mul_(2)

    with record() as log:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        there + 1
    assert set(log.native) == {"aten::mul_.Tensor", "aten::add.Tensor"}
    there + 1
    assert log.native["aten::add.Tensor"] == 1


def test_an_operator_without_a_kernel_is_told_apart(npu: State) -> None:
    there = torch.tensor([1, 2, 2], device="npu")
    with record() as log:
        assert there.mode().values.item() == 2
    assert dict(log.fallbacks) == {"aten::mode": 1}
    assert (npu.fallbacks, npu.last_fallback) == (1, b"aten::mode")


@pytest.mark.parametrize(
    "read",
    [
        lambda there: there.nonzero(),
        lambda there: there[there > 1],
        lambda there: there.max().item(),
        lambda there: bool(there.sum() > 3),
        lambda there: torch.equal(there, there),
    ],
    ids=["nonzero", "mask", "item", "truth", "equal"],
)
def test_waits_that_hide_in_operators_are_counted(npu: State, read: Callable[[torch.Tensor], object]) -> None:
    there = torch.tensor([1, 2, 2], device="npu")
    npu.reset_counters()
    with record() as log:
        read(there)
    assert npu.device_to_host == 1
    assert log.host_reads.total() == 1


def test_an_operator_of_torch_npu_without_a_reference_says_so(npu: State) -> None:
    there = torch.ones(2, 4, device="npu")
    with pytest.raises(NotImplementedError, match="no reference for npu::npu_fast_gelu"):
        torch.ops.npu.npu_fast_gelu(there)


def test_an_operator_of_torch_npu_runs_its_reference(npu: State) -> None:
    there = torch.randn(2, 8).half().npu()
    normed, _ = torch.ops.npu.npu_rms_norm(there, torch.ones(8).half().npu(), 1e-6)
    assert normed.device.type == "npu"
    assert torch.allclose(normed.cpu().float().pow(2).mean(-1), torch.ones(2), atol=1e-2)


def test_our_calls_fit_what_the_wheel_registers(npu: State) -> None:
    from tengserve_backend.devices.npu import operators

    rows, weight = torch.randn(3, 64).half().npu(), torch.ones(64).half().npu()
    assert operators.rms_norm(rows, weight, epsilon=1e-6).shape == (3, 64)
    assert operators.swiglu(rows).shape == (3, 32)
    heads, angles = torch.randn(1, 3, 2, 64).half().npu(), torch.zeros(1, 3, 1, 64).half().npu()
    assert operators.rotary(heads, angles + 1, angles).shape == heads.shape
