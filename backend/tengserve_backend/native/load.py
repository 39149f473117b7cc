"""The library of CPU operators, loaded once a process; built first where that has not been done."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.native.build import build_library, find_compiler, find_library
from tengserve_backend.native.compilers import BuildError

_NONE = (
    "no kernels for the CPU, which computes at less than half the speed, until this is mended and the server restarted"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The operators `torch.ops.tengserve_cpu` are there.

    Attributes:
        isa: the instruction set that they use on this machine.
    """

    isa: str


class _Once:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Future[CpuLibrary | None] | None = None


_once = _Once()


def cpu_library() -> Future[CpuLibrary | None]:
    """The library: at once when it is in the cache, else when a thread has built it; None when it cannot be had.

    Why it cannot is in the log, once a process. The thread is a daemon, and its compiler ends with the process.
    """
    with _once.lock:
        if _once.library is None:
            _once.library = _find_or_build()
        return _once.library


def _find_or_build() -> Future[CpuLibrary | None]:
    promise: Future[CpuLibrary | None] = Future()
    try:
        compiler = find_compiler()
        found = find_library(compiler)
    except ConfigurationError as error:  # There is no place for a cache.
        _log.warning("%s: %s", _NONE, error.message)
        promise.set_result(None)
        return promise
    if found is not None:
        promise.set_result(_load(found))
    elif compiler is None:
        chosen = os.environ.get("CXX")
        lack = f"CXX is {chosen}, which does not run" if chosen else "there is no C++ compiler (g++ or clang++)"
        _log.warning("%s: %s", _NONE, lack)
        promise.set_result(None)
    else:
        _log.info(
            "building the kernels for the CPU, a minute or more; meanwhile models answer on plain torch operators, and "
            "those with a quantization wait"
        )

        def build() -> None:
            library = None
            try:
                library = _load(build_library(compiler))
            except BuildError as error:
                _log.warning("%s: %s", _NONE, error)
                if error.said:
                    _log.info("the compiler said:\n%s", error.said)
            except Exception:  # noqa: BLE001  # whatever it is, models run without
                _log.exception("%s: the build failed", _NONE)
            promise.set_result(library)

        threading.Thread(target=build, name="build-cpu-kernels", daemon=True).start()
    return promise


def _load(library: Path) -> CpuLibrary | None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        isa: str = torch.ops.tengserve_cpu.isa()
    except (OSError, RuntimeError, AttributeError) as error:
        # What torch says of it is less than what the linker said to torch.
        _log.warning("%s: they do not load (%s)", _NONE, error.__cause__ or error)
        return None
    _log.info("kernels for the CPU use %s", isa)
    return CpuLibrary(isa)
