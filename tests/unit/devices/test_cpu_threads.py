"""How many threads a CPU computes with: what the process may use, and what the operator says."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from tengserve_backend.devices import cpu_threads
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.devices.cpu_threads import CpuThreads, threads_for
from tengserve_backend.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs, two to a core, without a limit."""
    monkeypatch.setattr(cpu_threads, "_allowed", lambda: frozenset(range(8)))
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def count(root: Path, asked: int | None = None, cpus: set[int] | None = None, **environment: str) -> int:
    affinity = None if cpus is None else frozenset(cpus)
    return threads_for(asked, affinity, environment=environment, root=root).count


def test_a_thread_a_core(machine):
    assert count(machine) == 4
    assert count(machine, cpus={0, 4, 1}) == 2


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)],
)
def test_no_more_than_the_whole_cpus_of_a_container(machine, limit, threads):
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/cpu.max", limit)
    assert count(machine) == threads


def test_the_least_limit_around_the_process_counts(machine):
    write(machine, "proc/self/cgroup", "0::/system.slice/tengserve.service\n")
    write(machine, "sys/fs/cgroup/system.slice/tengserve.service/cpu.max", "max 100000")
    write(machine, "sys/fs/cgroup/system.slice/cpu.max", "300000 100000")
    assert count(machine) == 3


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("-1", 4)])
def test_limits_of_the_old_interface(machine, quota, threads):
    write(machine, "proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/docker/1\n0::/\n")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert count(machine) == threads


def test_what_is_asked_for_goes_before_what_is_there(machine):
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert count(machine, OMP_NUM_THREADS="3,2") == 3
    assert count(machine, 6, OMP_NUM_THREADS="3") == 6
    assert count(machine, OMP_NUM_THREADS="many") == 1
    assert count(machine, OMP_NUM_THREADS="0") == 1


@pytest.mark.parametrize("asked", ["1025", "9" * 5000])
def test_more_than_a_system_would_start_is_refused(machine, asked):
    with pytest.raises(ConfigurationError, match=r"^OMP_NUM_THREADS is (1025|9{61}\.\.\.), but .* 1024 at most"):
        count(machine, OMP_NUM_THREADS=asked)


def test_cpus_that_the_process_may_not_use_are_refused(machine):
    with pytest.raises(ConfigurationError, match="cpuAffinity is 6-8, but the process may run on 0-7 only"):
        count(machine, cpus={6, 7, 8})


def test_an_engines_thread_and_those_that_it_starts_run_there():
    (one, *_) = sorted(os.sched_getaffinity(0))
    device = CpuDevice(threads=CpuThreads(1, frozenset({one})))
    seen: list[tuple[set[int], int]] = []

    def engine() -> None:
        device.bind_thread()
        inner = threading.Thread(target=lambda: seen.append((os.sched_getaffinity(0), torch.get_num_threads())))
        inner.start()
        inner.join()

    before = torch.get_num_threads()
    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [({one}, 1)]
