"""A device that fails: the code of Ascend's runtime comes up through the real torch_npu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu_sim.simulator.process import run_simulated
from npu_sim.simulator.state import FaultPoint, State

_CODES = (507015, 507899, 507053)


@pytest.mark.parametrize("code", _CODES)
@pytest.mark.parametrize(
    ("point", "work"),
    [
        (FaultPoint.SYNC, lambda there: torch.npu.current_stream().synchronize()),
        (FaultPoint.COPY, lambda there: there.cpu()),
        (FaultPoint.LAUNCH, lambda there: there + 1),
    ],
    ids=["sync", "copy", "launch"],
)
def test_the_code_is_in_the_error(
    npu: State, code: int, point: FaultPoint, work: Callable[[torch.Tensor], object]
) -> None:
    there = torch.ones(2, device="npu")
    npu.break_device(code, point)
    with pytest.raises(RuntimeError, match=f"error code is {code}"):
        work(there)


def test_it_shows_after_so_many_calls_and_stays(npu: State) -> None:
    there = torch.ones(2, device="npu")
    npu.break_device(507015, FaultPoint.LAUNCH, after=2)
    there = there + 1
    there = there + 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="507015"):
            there + 1
    npu.break_device(0)
    assert there.tolist() == [3.0, 3.0]


def test_a_process_can_start_with_a_fault_to_come() -> None:
    printed = run_simulated(
        """
        import torch
        try:
            for step in range(100):
                torch.ones(2, device="npu")
        except RuntimeError as error:
            print(step, "507899" in str(error))
        """,
        NPU_SIM_FAULT_CODE="507899",
        NPU_SIM_FAULT_POINTS=str(int(FaultPoint.LAUNCH)),
        NPU_SIM_FAULT_PASSES="5",
    )
    assert printed.split("\n")[-2] == "5 True"
