from __future__ import annotations

from collections import Counter

import pytest
import torch

from tengserve_backend.devices.npu.errors import (
    TABLE,
    NpuErrorKind,
    code_of,
    describe,
    explain,
    is_fault,
    is_out_of_memory,
)


def npu_error(code: int, call: str = "aclrtSynchronizeStream") -> RuntimeError:
    """As torch-npu words it."""
    return RuntimeError(
        f"operator():build/NPUStream.cpp:482 NPU function error: {call}(stream), error code is {code}\n"
        "[ERROR] 2026-11-30-04:00:00 (PID:7, Device:0, RankID:-1) ERR00100 PTA call acl api failed\n"
        "[Error]: ...\n        EE9999: Inner Error! error code is 507899\n"
    )


@pytest.mark.parametrize("code", [507015, 507018, 507046, 507054, 507899, 107022, 507033, 507077])
def test_errors_of_device_and_driver_end_the_process(code: int) -> None:
    error = npu_error(code)
    assert code_of(error) == code, "the first number counts"
    assert is_fault(error)
    assert not is_out_of_memory(error)
    assert explain(error).startswith(f"NPU error {code}: ")


@pytest.mark.parametrize("code", [161002, 561002, 107002, 207008, 507004])
def test_a_refused_call_does_not(code: int) -> None:
    assert not is_fault(npu_error(code))
    assert not is_out_of_memory(npu_error(code))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB"),
        npu_error(207001, "aclrtMalloc"),
        npu_error(207018),
        RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 0 bytes total capacity)"),
    ],
)
def test_out_of_memory_is_told_apart(error: RuntimeError) -> None:
    assert is_out_of_memory(error)
    assert not is_fault(error)
    assert "kvCacheMemory" in explain(error)


@pytest.mark.parametrize("said", ["FORCE STOP.", "HBM MULTI BIT ECC ERROR.", "SUSPECT MEM ERROR."])
def test_a_fault_is_known_by_its_words_where_the_number_is_left_out(said: str) -> None:
    assert is_fault(RuntimeError(said))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (507015x4 and 5x6)"),
        ValueError("error code is 507015"),
        KeyError(507015),
        RuntimeError(""),
    ],
)
def test_other_errors_have_nothing_to_do_with_the_device(error: Exception) -> None:
    assert describe(error) is None
    assert explain(error) == ""


def test_a_code_has_one_row_and_each_row_says_what_to_do() -> None:
    counts = Counter(code for row in TABLE for code in row.codes)
    assert set(counts.values()) == {1}
    for row in TABLE:
        assert row.codes, row
        assert not row.meaning.endswith("."), row
        assert not row.advice.endswith("."), row
    assert {row.kind for row in TABLE} == set(NpuErrorKind)
