"""The self-check's own judgement, with reference operators on the CPU in the place of the chip's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from support.npu_operators import npu_operators
from support.npu_reference import REFERENCES
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.operators import capabilities
from tengserve_backend.npu_selfcheck.operators import OperatorResult, check_operators

HALF = (torch.float16, torch.bfloat16)


def results(family: NpuFamily = NpuFamily.ATLAS_A2, **replaced: Any) -> list[OperatorResult]:
    device = SimpleNamespace(torch_device=torch.device("cpu"), family=family, upload=lambda host: host)
    with npu_operators({**REFERENCES, **{f"npu::{name}": function for name, function in replaced.items()}}):
        return list(check_operators(cast("NpuDevice", device), HALF, capabilities()))


def test_right_operators_are_right_in_every_number_format() -> None:
    found = results()
    assert all(result.right for result in found)
    assert {result.dtype for result in found} == {"float16", "bfloat16"}
    assert len({result.operator for result in found}) == 4


def test_a_wrong_operator_is_told_and_the_others_are_tried() -> None:
    found = results(npu_swiglu=lambda x, dim: REFERENCES["npu::npu_swiglu"](x, dim) * 1.1)
    assert {result.operator for result in found if not result.right} == {"npu_swiglu"}
    assert len(found) == len(results())


def test_a_number_that_is_none_is_wrong() -> None:
    found = results(npu_swiglu=lambda x, dim: REFERENCES["npu::npu_swiglu"](x, dim) * float("nan"))
    assert {result.operator for result in found if not result.right} == {"npu_swiglu"}


def test_what_an_error_means_is_told() -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("call failed, error code is 561002\nmore")

    found = [result for result in results(npu_rms_norm=refuse) if result.operator == "npu_rms_norm"]
    assert all("NPU error 561002" in result.reason for result in found)
    assert not any(result.lost for result in found)


def test_nothing_is_tried_on_a_lost_device() -> None:
    def lose(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507015")

    (result,) = results(npu_rms_norm=lose)
    assert result.lost


def test_what_a_chip_is_not_known_to_have_is_not_tried() -> None:
    found = results(NpuFamily.ASCEND_310P)
    assert {result.operator for result in found if result.tried} == {"npu_rms_norm", "npu_swiglu"}
    assert all(result.reason for result in found if not result.tried)


@pytest.mark.parametrize("text", ["x" * 10_000, "a\nb\x1b[0m"])
def test_a_foreign_message_is_one_short_line(text: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(text)

    reasons = {result.reason for result in results(npu_rms_norm=fail) if result.operator == "npu_rms_norm"}
    assert all(len(reason) <= 200 and reason.isprintable() for reason in reasons)
