"""CudaDevice over a torch.cuda whose figures a test says: no machine of ours has a GPU."""

from __future__ import annotations

import pytest
import torch

from tengserve_backend.devices.cuda import CudaDevice
from tengserve_backend.errors import ConfigurationError

GIB = 2**30


def test_the_cache_takes_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {torch.device("cuda", 1): (10 * GIB, 80 * GIB)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", free.__getitem__)
    device = CudaDevice(1)
    assert (device.name, device.available_memory(), device.default_cache_memory()) == ("cuda:1", 10 * GIB, 8 * GIB)
    assert device.default_cache_tokens(4096) is None


def test_the_peak_of_a_call_is_what_it_took_beyond_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, peak, waited = [5 * GIB], [9 * GIB], []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: peak.__setitem__(0, allocated[0]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: peak[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: allocated[0])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run() -> None:
        peak[0], allocated[0] = 8 * GIB, 6 * GIB

    assert CudaDevice(0).measure_peak(run) == 2 * GIB
    assert waited == [torch.device("cuda", 0)], "what a kernel takes is known when it has run"


@pytest.mark.parametrize(
    ("has_bfloat16", "stored", "computed"),
    [
        (True, torch.float32, torch.bfloat16),
        (False, torch.float32, torch.float16),
        (False, torch.float16, torch.float16),
        (True, torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_are_computed_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, stored: torch.dtype, computed: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    assert CudaDevice(0).default_dtype(stored) is computed


def test_bfloat16_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigurationError, match="dtype is bfloat16, which cuda:0 does not compute in; use float16"):
        CudaDevice(0).check_dtype(torch.bfloat16)
