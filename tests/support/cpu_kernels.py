"""The CPU's own kernels in tests: built once by whoever asks first, and then found in the cache."""

from __future__ import annotations

import pytest

from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.native.load import cpu_library

_BUILD_TIMEOUT_S = 900.0


def kernels_device(quantization: Quantization = Quantization.NONE) -> CpuDevice:
    """The CPU with its kernels; the test is left out where there is no compiler to build them with."""
    library = cpu_library()
    if library.result(_BUILD_TIMEOUT_S) is None:
        pytest.skip("the CPU kernels cannot be had here: the log says why")
    return CpuDevice(library, quantization=quantization)
