"""Whether NPUs can be used, decided once a process and before anything imports torch.

An installed torch-npu takes part in every import of torch and of transformers' models, and makes both fail where CANN
is missing, also for a process that never wanted an NPU. So each entry point calls `guard` first: a torch-npu that
cannot work is hidden from the imports that follow, and a model that asks for an NPU is told why in one sentence. A
torch-npu that can work is left as it is.

Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tengserve_backend.devices.npu import environment
from tengserve_backend.devices.npu.versions import Versions, installed_versions
from tengserve_backend.errors import foreign_reason

_log = logging.getLogger(__name__)

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PACKAGE = "torch_npu"
_LIBRARIES = ("libascendcl.so", "libhccl.so")
"""The first ones that torch-npu loads; the others come in the same packages of CANN."""
_DRIVER_LIBRARIES = ("libascend_hal", "libdrv", "libdcmi", "libtsdclient", "libmmpa")
"""What comes with the driver of the machine, and is mounted into a container."""
_UNINITIALIZED = 100001
"""CANN's error of a call that needs aclInit first. Nothing says that counting devices does, or that it does not."""
_FOLDERS = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH")


class NpuState(enum.Enum):
    """What stands in the way of using NPUs."""

    USABLE = "usable"
    NOT_INSTALLED = "not installed"
    WRONG_TORCH = "another torch"
    NO_CANN = "no CANN"
    NO_DEVICE = "no device"


@dataclass(frozen=True, slots=True)
class NpuReadiness:
    """Whether NPUs can be used.

    Attributes:
        state: the first thing that is missing.
        reason: one sentence: what is missing, and what to do; "" when usable.
        devices: how many NPUs the process sees, as far as that is known; after `import_torch` it is.
    """

    state: NpuState
    reason: str = ""
    devices: int = 0

    @property
    def usable(self) -> bool:
        """Whether a model can be put on an NPU."""
        return self.state is NpuState.USABLE


_lock = threading.Lock()
_decided: NpuReadiness | None = None


def guard(*, log_unusable: bool = True, device_files: Path = Path("/dev")) -> NpuReadiness:
    """Decide, and prepare the process for the first import of torch. Later calls give the same answer.

    Usable: what torch-npu reads from the environment once is set, never over the operator's. Installed and not usable:
    it is hidden from torch, transformers and accelerate, and the log says so. Not installed, on a machine with NPUs:
    the log says so too.

    Args:
        log_unusable: False where the caller itself says why NPUs are not used.
        device_files: where the driver has its files, davinci0 and so on.
    """
    global _decided
    with _lock:
        if _decided is None:
            _decided = assess(os.environ)
            if _decided.usable:
                for name, value in environment.prepare(os.environ).items():
                    _log.info("%s=%s is set for torch-npu", name, value)
            else:
                installed = _decided.state is not NpuState.NOT_INSTALLED
                if installed:
                    forgo()
                if log_unusable and (installed or any(device_files.glob("davinci[0-9]*"))):
                    _log.warning("NPUs are not used: %s", _decided.reason)
        return _decided


def forgo() -> None:
    """Let nothing find torch-npu: torch looks for it by itself, transformers and accelerate by name.

    For a process that computes on the CPU only it is of no use whatever its state.
    """
    os.environ[_AUTOLOAD] = "0"
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # what the import system takes for "there is none"


def import_torch() -> NpuReadiness:
    """Import torch, and torch-npu where `guard` found it usable. Called before transformers is imported.

    torch would import it by itself, but its failure would be torch's then, and of no use to a model on the CPU. Here a
    torch-npu that fails all the same is hidden like one that cannot work, and what it said is the reason.
    """
    global _decided
    readiness = guard()
    with _lock:
        if not readiness.usable or _PACKAGE in sys.modules:
            return _decided or readiness
        before = os.environ.get(_AUTOLOAD)
        os.environ[_AUTOLOAD] = "0"
        try:
            import torch  # first and without its autoload; see above

            importlib.import_module(_PACKAGE)
            count = int(torch.npu.device_count())  # type: ignore[attr-defined]  # torch-npu adds it
        except Exception as error:  # an accelerator's package: whatever it raises, it does not work here
            if "torch" not in sys.modules:
                raise  # torch itself cannot be imported.
            for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]
            reason = (
                f"torch-npu cannot be imported ({foreign_reason(error)}); "
                f"check that its versions belong together: {installed_versions(os.environ)}"
            )
            _decided = NpuReadiness(NpuState.NO_CANN, reason)
            forgo()
            _log.warning("NPUs are not used: %s", reason, exc_info=error)
            return _decided
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before
        # torch-npu's own count is the one that counts.
        _decided = NpuReadiness(NpuState.USABLE, devices=count) if count else _no_device(os.environ, 0)
        return _decided


def assess(
    environ: Mapping[str, str],
    *,
    installed: Callable[[], bool] = lambda: importlib.util.find_spec(_PACKAGE) is not None,
    versions: Callable[[Mapping[str, str]], Versions] = installed_versions,
    load: Callable[[str], Any] = ctypes.CDLL,
) -> NpuReadiness:
    """What `guard` decides, with no effect but that CANN's libraries are loaded.

    Args:
        environ: the process's environment.
        installed: whether there is a torch_npu to import.
        versions: of torch, torch-npu and CANN.
        load: loads a shared library by name, as ctypes.CDLL does; raises OSError.
    """
    if not installed():
        return NpuReadiness(
            NpuState.NOT_INSTALLED,
            'torch-npu is not installed: run `pip install ".[npu]"` in tengserve\'s folder, beside the CPU build of '
            "torch, see docs/npu.md",
        )
    if disagreement := versions(environ).disagreement:
        return NpuReadiness(NpuState.WRONG_TORCH, disagreement)
    if fault := environment.conflict(environ):
        return NpuReadiness(NpuState.NO_CANN, fault)
    try:
        runtime, *_ = [load(library) for library in _LIBRARIES]
    except OSError as error:
        return NpuReadiness(NpuState.NO_CANN, _missing(str(error)))
    if fault := _missing_folder(environ):
        return NpuReadiness(NpuState.NO_CANN, fault)
    count = ctypes.c_uint32(0)
    code = int(runtime.aclrtGetDeviceCount(ctypes.byref(count)))
    if code == _UNINITIALIZED:
        return NpuReadiness(NpuState.USABLE)  # It will tell once torch-npu has initialized it.
    if code != 0 or count.value == 0:
        return _no_device(environ, code)
    return NpuReadiness(NpuState.USABLE, devices=count.value)


def _no_device(environ: Mapping[str, str], code: int) -> NpuReadiness:
    because = f"CANN answers with error {code}" if code else "CANN finds no device"
    return NpuReadiness(
        NpuState.NO_DEVICE,
        f"no NPU is visible ({because}): {environment.visibility(environ)}; check both, and that /dev/davinciN, "
        "/dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc are in the container",
    )


def _missing(said: str) -> str:
    """What to do about a library that does not load; the loader names the one that is missing first."""
    library = said.partition(":")[0].strip()
    if library.startswith(_DRIVER_LIBRARIES):
        return (
            f"torch-npu is installed, but {library} of the NPU driver is missing: mount the machine's "
            "/usr/local/Ascend/driver into the container, and have its lib64 folders in LD_LIBRARY_PATH"
        )
    if not library.startswith("lib"):
        library = _LIBRARIES[0]
    return (
        f"torch-npu is installed, but {library} of CANN cannot be loaded: install the CANN toolkit, and run "
        "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` before the server starts"
    )


def _missing_folder(environ: Mapping[str, str]) -> str:
    """What torch-npu's own check of CANN's folders would raise an error for; it checks only when the first is set."""
    home, operators = _FOLDERS
    if home not in environ:
        return ""
    for name, path in (
        (home, environ[home]),
        (operators, environ.get(operators, "")),
        (f"{home}/runtime", os.path.join(environ[home], "runtime")),
        (f"{home}/compiler", os.path.join(environ[home], "compiler")),
    ):
        if not path or not os.path.exists(path):
            return (
                f"torch-npu is installed, but {name} of CANN is {'missing' if path else 'not set'}: run all of CANN's "
                "set_env.sh before the server starts, and check that the toolkit is installed whole"
            )
    return ""
