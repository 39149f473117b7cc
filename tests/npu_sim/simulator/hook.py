"""Turns the simulation on in a process: `site` imports it at start when NPU_SIM=1, by way of a .pth file of .venv-npu.

The libraries are found by their names once they are loaded, as after CANN's set_env.sh; the kernels are registered at
the end of the import of torch_npu, whoever imports it. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")


def activate(libraries: str) -> None:
    """Load the stand-in runtime and wait for torch_npu.

    Args:
        libraries: the folder of the runtime.

    Raises:
        OSError: the runtime is not built.
    """
    for name in _LIBRARIES:
        ctypes.CDLL(f"{libraries}/lib{name}.so", mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _AfterTorchNpu())


class _AfterTorchNpu(importlib.abc.MetaPathFinder):
    """Finds torch_npu as if it were not there, and has the kernels registered after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from npu_sim.simulator.kernels import install

        install()
