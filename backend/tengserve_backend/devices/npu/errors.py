"""What an error of torch-npu means: out of memory, a lost device, or one refused call; and what to do about it.

torch-npu raises a RuntimeError whose text holds the number that CANN gave, and torch.OutOfMemoryError where its
allocator finds no memory. Names and numbers are those of CANN's `acl/error_codes/rt_error_codes.h`, which every
torch-npu wheel ships, and for operators (six digits beginning with 161, 361 or 561) of CANN's aclnn documentation. The
table below is also the one of docs/npu.md.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import torch


class NpuErrorKind(enum.Enum):
    """What follows from an error."""

    OUT_OF_MEMORY = "a smaller batch is tried"
    FAULT = "the process ends"
    REFUSED = "requests are run one by one, and what fails alone fails"


@dataclass(frozen=True, slots=True)
class NpuError:
    """One row.

    Attributes:
        codes: CANN's numbers.
        kind: what follows.
        meaning: what has happened, without a full stop.
        advice: what to do, without a full stop.
    """

    codes: tuple[int, ...]
    kind: NpuErrorKind
    meaning: str
    advice: str


_OUT_OF_MEMORY, _FAULT, _REFUSED = NpuErrorKind

TABLE = (
    NpuError(
        (207001, 207018),
        _OUT_OF_MEMORY,
        "the device is out of memory",
        "lower kvCacheMemory, maxBatchedTokens or maxBatchSize, and look for other processes on the device with "
        "npu-smi info",
    ),
    NpuError(
        (107002,),
        _REFUSED,
        "a thread used the device without binding it (context is empty)",
        "this is a defect: report it with the log",
    ),
    NpuError(
        (107022, 107023, 107035),
        _FAULT,
        "the device's tasks were aborted, mostly because of an earlier error",
        "look for the first error in the log, and for a reset of the device in dmesg and npu-smi info",
    ),
    NpuError(
        (207005, 207007, 207008, 207009),
        _REFUSED,
        "the device has no stream, event or queue left, or another of its resources is used up",
        "stop other processes on the device; the disk is not full, whatever the message says",
    ),
    NpuError(
        (507008,),
        _FAULT,
        "the kernels are for another chip",
        "use the CANN packages, or the image, of this chip family",
    ),
    NpuError(
        (507010, 507033, 507051, 507052, 507899, 507901),
        _FAULT,
        "the driver cannot reach or start the device",
        "check npu-smi info and the device files in the container, compare driver, firmware and CANN versions, and "
        "reset the device or its machine",
    ),
    NpuError(
        (507011, 507012, 507014, 507017, 507034, 507046, 507047, 507048),
        _FAULT,
        "a kernel did not finish in time",
        "look for the operator in CANN's log (~/ascend/log), and set ASCEND_LAUNCH_BLOCKING=1 once to see where it "
        "stops",
    ),
    NpuError(
        (507015, 507016, 507018, 507035, 507036, 507042, 507043, 507044, 507045, 507049, 507050),
        _FAULT,
        "a kernel failed on the device",
        "set ASCEND_LAUNCH_BLOCKING=1 once to see which operator it is, and report it with the log and the output of "
        "tengserve npu-selfcheck",
    ),
    NpuError(
        (507013, 507053, 507054, 507055),
        _FAULT,
        "the device's memory is damaged, or a transfer failed",
        "take the device out of service and have it checked; npu-smi info -t ecc shows its error counters",
    ),
    NpuError(
        (507056, 507057, 507904, 507914),
        _FAULT,
        "a link to another device failed",
        "check the links with hccn_tool and npu-smi info",
    ),
    NpuError(
        (161001, 161002),
        _REFUSED,
        "an operator refused its arguments",
        "report it with the log: the call breaks a rule of this CANN version",
    ),
    NpuError(
        (361001,),
        _REFUSED,
        "an operator's call of the runtime failed",
        "look for an earlier error in the log",
    ),
    NpuError(
        (561000, 561001, 561002, 561003),
        _REFUSED,
        "an operator could not be prepared: its shapes or lengths do not fit, or its kernel is not installed",
        "check that the CANN kernels of this chip are installed, and report it with the log",
    ),
)

_BY_CODE = {code: row for row in TABLE for code in row.codes}
_CODE = re.compile(r"error code(?: is)?[:\s]*(\d{6})\b|\b(?:ret|retcode|errorCode)\s*[=:]\s*(\d{6})\b", re.IGNORECASE)
_MAX_SEARCHED_CHARS = 20_000
_OTHER_FAULT = NpuError(
    (),
    _FAULT,
    "the device, its driver or its runtime failed",
    "look up the number in CANN's documentation, and for earlier errors in the log",
)
_RUNTIME_FAULTS = range(507000, 508000)
"""CANN's errors of device, driver and runtime. One that is not in the table counts as a lost device: if it was not, a
restart has cost a minute; the other way round every request would fail until somebody looks."""
_HARMLESS = frozenset({507004, 507005, 507006, 507910, 507911})
"""Of those, what says nothing about the device: not complete yet, end of a sequence, host memory (un)registered."""
_FAULT_WORDS = re.compile(
    r"FORCE STOP|UCE ERROR|HBM MULTI BIT ECC|SUSPECT (?:MEM|DEVICE MEM|REMOTE) ERROR|HCCS LINK ERROR|device task abort"
)
"""What torch-npu writes for some of them, without the number when TORCH_NPU_COMPACT_ERROR_OUTPUT is set."""


def code_of(error: BaseException) -> int | None:
    """CANN's number in an error's text; None when there is none.

    The first one counts: what follows it was caused by it.
    """
    found = _CODE.search(str(error)[:_MAX_SEARCHED_CHARS])
    return int(found[1] or found[2]) if found else None


def describe(error: BaseException) -> NpuError | None:
    """The row of an error; None for one that has nothing to do with the device."""
    if isinstance(error, torch.OutOfMemoryError):
        return _BY_CODE[207001]
    if not isinstance(error, RuntimeError):
        return None
    code = code_of(error)
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code in _RUNTIME_FAULTS and code not in _HARMLESS:
        return _OTHER_FAULT
    text = str(error)[:_MAX_SEARCHED_CHARS]
    if "NPU out of memory" in text:
        return _BY_CODE[207001]
    return _OTHER_FAULT if _FAULT_WORDS.search(text) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may succeed."""
    row = describe(error)
    return row is not None and row.kind is _OUT_OF_MEMORY


def is_fault(error: BaseException) -> bool:
    """Whether nothing on the device can succeed any more in this process."""
    row = describe(error)
    return row is not None and row.kind is _FAULT


def explain(error: BaseException) -> str:
    """One sentence for the operator: the number, its meaning and what to do; "" for what is no error of the device."""
    row = describe(error)
    if row is None:
        return ""
    code = code_of(error)
    number = "" if code is None else f"NPU error {code}: "
    return f"{number}{row.meaning}; {row.advice}."
