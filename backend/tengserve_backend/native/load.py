"""The library of CPU operators, loaded once a process; built first where that has not been done."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.native.build import BuildError, build_library, find_compiler, find_library

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
        _log.warning("no kernels for the CPU, which computes with plain torch operators: %s", error.message)
        promise.set_result(None)
        return promise
    if found is not None:
        promise.set_result(_load(found))
    elif compiler is None:
        _log.warning(
            "no kernels for the CPU, which computes with plain torch operators, at less than half the speed: there is "
            "no C++ compiler to build them with (g++ or clang++)"
        )
        promise.set_result(None)
    else:
        _log.info("building the kernels for the CPU; models start on plain torch operators meanwhile")

        def build() -> None:
            try:
                library = _load(build_library(compiler))
            except BuildError as error:
                _log.warning("no kernels for the CPU, which computes with plain torch operators: %s", error)
                library = None
            except BaseException as error:
                promise.set_exception(error)
                raise
            promise.set_result(library)

        threading.Thread(target=build, name="build-cpu-kernels", daemon=True).start()
    return promise


def _load(library: Path) -> CpuLibrary | None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        isa: str = torch.ops.tengserve_cpu.isa()
    except (OSError, RuntimeError, AttributeError) as error:
        _log.warning("no kernels for the CPU, which computes with plain torch operators: they do not load (%s)", error)
        return None
    _log.info("kernels for the CPU use %s", isa)
    return CpuLibrary(isa)
