"""Which device a model runs on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.devices.cpu_threads import threads_for
from tengserve_backend.devices.cuda import CudaDevice
from tengserve_backend.devices.npu import errors
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.devices.npu.environment import visibility
from tengserve_backend.devices.npu.guard import import_torch
from tengserve_backend.errors import ConfigurationError, DeviceLostError
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.native.load import CpuLibrary, cpu_library

_log = logging.getLogger(__name__)


def select_device(
    setting: str,
    *,
    cpu_kernels: bool = True,
    cpu_threads: int | None = None,
    cpu_affinity: frozenset[int] | None = None,
    quantization: Quantization = Quantization.NONE,
    waiting: Callable[[Future[CpuLibrary | None]], None] = lambda kernels: None,
) -> DeviceBackend:
    """The device that the `device` setting names.

    Args:
        setting: auto, npu, npu:N, cuda, cuda:N or cpu; auto is the first of NPU, CUDA and CPU that there is.
        cpu_kernels: whether a CPU computes with our own operators; they are built where they are not there yet.
        cpu_threads, cpu_affinity: how many threads compute on a CPU, and where; None leaves it to `threads_for`.
        quantization: of linear layers; anything but none is of CPUs with our own operators, which are waited for.
        waiting: called before that wait where they are still to be built; an error that it raises ends the wait.

    Raises:
        ConfigurationError: the machine has no such device, or no such CPUs, or the device cannot quantize.
        DeviceLostError: it has failed.
    """
    kind, _, number = setting.partition(":")
    if kind == "auto":
        kind = "npu" if import_torch().usable else "cuda" if torch.cuda.is_available() else "cpu"
    index = int(number or 0)
    if quantization is not Quantization.NONE and kind != "cpu":
        raise ConfigurationError(
            f"quantization is {quantization.value!r}, but the device is {kind}: weights are quantized on a CPU only; "
            "set quantization to none or device to cpu"
        )
    if kind == "npu":
        return _npu(setting, index)
    if kind == "cuda":
        return _cuda(setting, index)
    threads = threads_for(cpu_threads, cpu_affinity)
    # The thread that loads computes too, on whatever CPUs.
    torch.set_num_threads(threads.count)
    _log.info("the CPU computes with %s", threads)
    kernels = cpu_library() if cpu_kernels else None
    if quantization is not Quantization.NONE:
        _need_kernels(kernels, quantization, waiting)
    return CpuDevice(kernels, threads, quantization)


def _need_kernels(
    kernels: Future[CpuLibrary | None] | None,
    quantization: Quantization,
    waiting: Callable[[Future[CpuLibrary | None]], None],
) -> None:
    """Wait for our operators: nothing else computes with quantized weights, and a model must not change under way.

    Their build has a limit of its own.

    Raises:
        ConfigurationError: they cannot be had.
    """
    if kernels is None:
        reason = "cpuKernels is off"
    else:
        if not kernels.done():
            waiting(kernels)
        if kernels.result() is not None:
            return
        reason = "they cannot be had, and the log says why"
    raise ConfigurationError(
        f"quantization is {quantization.value!r}, which needs the CPU kernels, but {reason}; set quantization to none"
    )


def _npu(setting: str, index: int) -> NpuDevice:
    readiness = import_torch()
    if not readiness.usable:
        raise ConfigurationError(f"device is {setting!r}, but {readiness.reason}")
    if index >= readiness.devices:
        raise ConfigurationError(
            f"device is {setting!r}, but the process sees NPUs 0 to {readiness.devices - 1}: {visibility(os.environ)}"
        )
    try:
        return NpuDevice(index)
    except RuntimeError as error:
        if not errors.is_fault(error):
            raise
        lost = DeviceLostError(f"The device npu:{index} failed.")
        _log.critical("%s %s", lost.message, errors.explain(error))
        raise lost from error


def _cuda(setting: str, index: int) -> CudaDevice:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device is {setting!r} but torch {torch.__version__} finds no CUDA device on this machine; "
            "install a CUDA build of torch and the driver, or set device to cpu"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigurationError(f"device is {setting!r} but this machine has CUDA devices 0 to {count - 1}")
    return CudaDevice(index)
