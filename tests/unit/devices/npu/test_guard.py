from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.torch_npu_package import write_torch_npu
from tengserve_backend.devices.npu.guard import NpuReadiness, NpuState, assess
from tengserve_backend.devices.npu.versions import Versions

MATCHING = Versions("2.10.0+cpu", "2.10.0.post4", "9.1.0")


class Runtime:
    """libascendcl as far as the guard calls it."""

    def __init__(self, devices: int = 1, code: int = 0) -> None:
        self._devices = devices
        self._code = code

    def aclrtGetDeviceCount(self, count: Any) -> int:  # noqa: N802  # the library's own name
        count._obj.value = self._devices
        return self._code


def missing(message: str) -> Callable[[str], Any]:
    def load(library: str) -> Any:
        raise OSError(message)

    return load


def assessed(
    environ: dict[str, str] | None = None,
    *,
    installed: bool = True,
    versions: Versions = MATCHING,
    load: Callable[[str], Any] = lambda library: Runtime(),
) -> NpuReadiness:
    return assess(environ or {}, installed=lambda: installed, versions=lambda _: versions, load=load)


def test_without_torch_npu_the_command_that_installs_it_is_named() -> None:
    readiness = assessed(installed=False)
    assert readiness.state is NpuState.NOT_INSTALLED
    assert 'pip install ".[npu]"' in readiness.reason
    assert "docs/npu.md" in readiness.reason


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("libascendcl.so: cannot open shared object file: No such file or directory", "libascendcl.so of CANN"),
        ("libhccl.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        ("libascend_hal.so: cannot open shared object file: No such file or directory", "mount the machine's"),
        ("something unheard of", "libascendcl.so of CANN cannot be loaded"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_do(said: str, advice: str) -> None:
    readiness = assessed(load=missing(said))
    assert readiness.state is NpuState.NO_CANN
    assert advice in readiness.reason


def test_half_of_set_env_is_not_enough(tmp_path: Path) -> None:
    """torch-npu raises an error on import for each of these."""
    environ = {"ASCEND_HOME_PATH": str(tmp_path)}
    assert "ASCEND_OPP_PATH of CANN is not set" in assessed(environ).reason
    environ["ASCEND_OPP_PATH"] = str(tmp_path)
    assert "ASCEND_HOME_PATH/runtime of CANN is missing" in assessed(environ).reason
    (tmp_path / "runtime").mkdir()
    (tmp_path / "compiler").mkdir()
    assert assessed(environ).usable


@pytest.mark.parametrize("runtime", [Runtime(devices=0), Runtime(code=507899)])
def test_no_device_explains_both_visibility_variables(runtime: Runtime) -> None:
    readiness = assessed(
        {"ASCEND_RT_VISIBLE_DEVICES": "3,4", "PATH": "/bin"},
        load=lambda library: runtime,
    )
    assert readiness.state is NpuState.NO_DEVICE
    assert 'ASCEND_RT_VISIBLE_DEVICES is "3,4"' in readiness.reason
    assert "ASCEND_VISIBLE_DEVICES is not set" in readiness.reason


def test_a_torch_npu_for_another_torch_is_never_loaded() -> None:
    def load(library: str) -> Any:
        pytest.fail("its libraries miss symbols")

    readiness = assessed(versions=Versions("2.13.0", "2.10.0.post4", ""), load=load)
    assert readiness.state is NpuState.WRONG_TORCH
    assert "torch==2.10.*" in readiness.reason


def test_variables_that_end_the_process_are_told_before_they_do() -> None:
    readiness = assessed({"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"})
    assert "unset one" in readiness.reason


def test_a_runtime_that_counts_only_after_its_start_is_asked_later() -> None:
    assert assessed(load=lambda library: Runtime(devices=0, code=100001)).usable


def test_usable_says_how_many() -> None:
    readiness = assessed(load=lambda library: Runtime(devices=2))
    assert readiness == NpuReadiness(NpuState.USABLE, "", 2)


def test_every_reason_is_one_sentence_without_an_end() -> None:
    """It is put after "device is npu, but"."""
    for readiness in (
        assessed(installed=False),
        assessed(load=missing("libx.so: y")),
        assessed({"ASCEND_HOME_PATH": "/no"}),
    ):
        assert "\n" not in readiness.reason
        assert not readiness.reason.endswith(".")


def run(program: str, *folders: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    variables.pop("PYTHONWARNINGS", None)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


IMPORTS = """
import torch
from transformers import LlamaForCausalLM
from accelerate.utils import is_npu_available
print("imported", is_npu_available(), hasattr(torch, "npu"))
"""


def test_a_torch_npu_without_cann_stops_torch_unless_guarded(tmp_path: Path) -> None:
    folder = write_torch_npu(tmp_path)
    unguarded = run(IMPORTS, folder)
    assert "libhccl.so" in unguarded.stderr, "the package is the trap that it should be"
    guarded = run(f"from tengserve_backend.devices.npu.guard import guard\nprint(guard().reason){IMPORTS}", folder)
    assert guarded.returncode == 0, guarded.stderr
    assert "set_env.sh" in guarded.stdout
    assert "imported False False" in guarded.stdout
    assert guarded.stderr.count("NPUs are not used: ") == 1


WITHOUT_TORCH_NPU = """
import pathlib, sys
from tengserve_backend.devices.npu import guard
missing = guard.NpuReadiness(guard.NpuState.NOT_INSTALLED, "torch-npu is not installed")
guard.assess = lambda environ: missing
for _ in range(2):
    guard.guard(device_files=pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize(("names", "warnings"), [(["davinci0", "davinci1"], 1), (["davinci_manager", "null"], 0)])
def test_npus_that_nothing_uses_are_told_of_once(tmp_path: Path, names: list[str], warnings: int) -> None:
    for name in names:
        (tmp_path / name).touch()
    said = run(WITHOUT_TORCH_NPU, arguments=[str(tmp_path)])
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("NPUs are not used: torch-npu is not installed") == warnings


PRETEND = """
from tengserve_backend.devices.npu import guard
guard.assess = lambda environ: guard.NpuReadiness(guard.NpuState.USABLE, devices=1)
readiness = guard.import_torch()
print(readiness.usable, readiness.reason)
"""


COUNTS = """
import types, torch
torch.npu = types.SimpleNamespace(device_count=lambda: {count})
"""


def test_a_torch_npu_that_fails_all_the_same_is_hidden(tmp_path: Path) -> None:
    folder = write_torch_npu(tmp_path, 'import os\nraise RuntimeError("undefined symbol: aclrtNew")')
    result = run(f"{PRETEND}print(guard.guard().usable){IMPORTS}", folder)
    assert result.returncode == 0, result.stderr
    assert "False torch-npu cannot be imported (undefined symbol: aclrtNew)" in result.stdout
    assert "imported False False" in result.stdout


def test_a_torch_npu_that_works_is_imported_and_children_load_it_by_themselves(tmp_path: Path) -> None:
    folder = write_torch_npu(tmp_path, COUNTS.format(count=2))
    result = run(
        f"{PRETEND}import os, sys\n"
        "print('torch_npu' in sys.modules, os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'),"
        " os.environ['PYTORCH_NPU_ALLOC_CONF'], readiness.devices)",
        folder,
    )
    assert result.stdout.splitlines() == ["True ", "True None expandable_segments:True 2"], result.stderr


def test_the_count_of_torch_npu_is_the_one_that_counts(tmp_path: Path) -> None:
    result = run(PRETEND, write_torch_npu(tmp_path, COUNTS.format(count=0)))
    assert "False no NPU is visible (CANN finds no device): ASCEND_RT_VISIBLE_DEVICES is not set" in result.stdout


def test_the_guard_brings_nothing_heavy() -> None:
    result = run(
        "import sys, tengserve_backend.devices.npu.guard\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr
