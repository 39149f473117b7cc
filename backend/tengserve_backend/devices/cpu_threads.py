"""How many threads a CPU computes with, and where they run.

The compute threads wait for each other after every part of a step, so one that gets no core holds up all. There must be
no more of them than cores that this process may use at the same time; a container's limit counts as its cores do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.cpu_list import parse_cpus, write_cpus
from tengserve_backend.repository.settings import MAX_THREADS


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """The threads that an engine computes with.

    Attributes:
        count: how many, the engine's own included.
        cpus: where they may run; None leaves that to the system.
    """

    count: int
    cpus: frozenset[int] | None = None

    def bind(self) -> None:
        """Let the calling thread compute so. The threads that it starts to compute inherit its CPUs."""
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)
        torch.set_num_threads(self.count)

    def __str__(self) -> str:
        where = "" if self.cpus is None else f" on CPUs {write_cpus(self.cpus)}"
        return f"{self.count} {'thread' if self.count == 1 else 'threads'}{where}"


def threads_for(
    count: int | None,
    cpus: frozenset[int] | None,
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> CpuThreads:
    """The threads for two settings.

    Args:
        count: cpuThreads; None takes what OMP_NUM_THREADS says, else a thread for each core that the process may use,
            and no more than whole CPUs of its control group's limit.
        cpus: cpuAffinity.
        environment: of the process.
        root: of the file system.

    Raises:
        ConfigurationError: the process may not run on these CPUs, or OMP_NUM_THREADS is out of bounds.
    """
    allowed = _allowed()
    if cpus is not None and not cpus <= allowed:
        raise ConfigurationError(
            f"cpuAffinity is {write_cpus(cpus)}, but the process may run on {write_cpus(allowed)} only"
            if allowed
            else "cpuAffinity is set, but this system does not bind threads to CPUs"
        )
    if count is None:
        count = _asked(environment)
    if count is None:
        count = _cores(cpus or allowed, root) or os.cpu_count() or 1
        limit = _limit(root)
        if limit is not None:
            count = max(1, min(count, int(limit)))
    return CpuThreads(count, cpus)


def _allowed() -> frozenset[int]:
    """The CPUs that this process may run on; none where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it; macOS and Windows do not.
    return frozenset() if affinity is None else frozenset(affinity(0))


def _asked(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, of which the first number is that of the outermost level.

    Raises:
        ConfigurationError: it is more than a system would start.
    """
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not (first.isascii() and first.isdigit()):
        return None
    digits = first.lstrip("0")
    if len(digits) > len(str(MAX_THREADS)) or int(digits or 0) > MAX_THREADS:
        raise ConfigurationError(f"OMP_NUM_THREADS is {shown(first)}, but a model computes with {MAX_THREADS} at most")
    return int(digits) if digits else None


def _cores(cpus: frozenset[int], root: Path) -> int:
    """Cores among some CPUs. Two hardware threads of a core share what computes, so they count once."""
    folder = root / "sys/devices/system/cpu"
    cores = set()
    for cpu in cpus:
        try:
            siblings = parse_cpus((folder / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except (OSError, ValueError):
            siblings = frozenset((cpu,))
        cores.add(min(siblings))
    return len(cores)


def _limit(root: Path) -> float | None:
    """CPUs that the control groups of this process give it, the least of them; None without a limit."""
    limits = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return min(limits) if limits else None


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of those around them, for both versions of the interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # A container's own view may begin at its group, whose path is then not to be found below.
        folder = base / group.strip("/")
        yield folder
        while folder != base:
            folder = folder.parent
            yield folder


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # There is no limit: "max", or no file.
        return None
