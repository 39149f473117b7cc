"""Which device a model runs on."""

from __future__ import annotations

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.devices.cuda import CudaDevice
from tengserve_backend.errors import ConfigurationError


def select_device(setting: str) -> DeviceBackend:
    """The device that the `device` setting names.

    Args:
        setting: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigurationError: the machine has no such device.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device is {setting!r} but torch {torch.__version__} finds no CUDA device on this machine; "
            "install a CUDA build of torch and the driver, or set device to cpu"
        )
    index = 0 if setting in ("auto", "cuda") else int(setting.removeprefix("cuda:"))
    if index >= count:
        raise ConfigurationError(f"device is {setting!r} but this machine has CUDA devices 0 to {count - 1}")
    return CudaDevice(index)
