"""Environment variables of torch-npu: the ones that are read once, when it is imported, and those about visibility."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
_SHARED_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_DEFAULT = "expandable_segments:True"

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
"""Which of the devices in this container the process may use, by number; they are renumbered from 0."""
MOUNTED = "ASCEND_VISIBLE_DEVICES"
"""Which devices of the machine the container runtime put into this container; the process does not read it."""

REPORTED = (
    VISIBLE,
    MOUNTED,
    _ALLOCATOR,
    _SHARED_ALLOCATOR,
    "TASK_QUEUE_ENABLE",
    "ASCEND_LAUNCH_BLOCKING",
    "CPU_AFFINITY_CONF",
    "OMP_NUM_THREADS",
)
"""What a report about an NPU should show when it is set."""


def prepare(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what torch-npu reads once, where the operator has set nothing; what was set.

    - Segments that grow keep the allocator from running out of memory through fragmentation. torch-npu takes one of two
      variables and ends the process when both are set, so ours is left alone as soon as either is there.
    - OMP_NUM_THREADS is the operator's alone, though one thread suits a process whose models all run on NPUs: a model
      on the CPU may be in the same process, and would compute on one core.
    - CPU_AFFINITY_CONF too: torch-npu pins threads as if all cores of the machine were the process's.
    """
    if _ALLOCATOR in environ or _SHARED_ALLOCATOR in environ:
        return {}
    environ[_ALLOCATOR] = _ALLOCATOR_DEFAULT
    return {_ALLOCATOR: _ALLOCATOR_DEFAULT}


def conflict(environ: Mapping[str, str]) -> str:
    """One sentence about variables that torch-npu would end the process for, else ""."""
    if environ.get(_ALLOCATOR) and environ.get(_SHARED_ALLOCATOR):
        return f"{_ALLOCATOR} and {_SHARED_ALLOCATOR} are both set, and torch-npu takes only one of them: unset one"
    return ""


def visibility(environ: Mapping[str, str]) -> str:
    """What the two variables say, as the end of a sentence about devices that are not there."""

    def value(name: str) -> str:
        return f'{name} is "{environ[name]}"' if name in environ else f"{name} is not set"

    return (
        f"{value(VISIBLE)} (which of this container's devices the process uses, counted from 0 again) and "
        f"{value(MOUNTED)} (which devices of the machine the container runtime mounts)"
    )


def is_simulated(environ: Mapping[str, str]) -> bool:
    """Whether there is no chip behind the runtime: the simulated NPU of this project's tests says so."""
    return environ.get("NPU_SIM") == "1"
