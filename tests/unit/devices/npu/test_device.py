"""NpuDevice over a torch.npu that only remembers; what really happens on one is for the simulated NPU."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from support.architectures import build_model
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.devices.npu.fusion import FUSIONS
from tengserve_backend.devices.npu.guard import NpuReadiness, NpuState
from tengserve_backend.devices.select import select_device
from tengserve_backend.errors import ConfigurationError, DeviceLostError
from tengserve_backend.execution.attention.tier import AttentionNeeds
from tengserve_backend.npu_selfcheck.operators import said
from tengserve_backend.repository.settings import NPU_FUSIONS

GIB = 2**30


class FakeNpu:
    """torch.npu.

    Attributes:
        calls: each with its thread.
        allocated, peak: bytes that a test says are in use.
    """

    def __init__(self, soc: str) -> None:
        self.soc = soc
        self.calls: list[tuple[str, object, int]] = []
        self.allocated = 0
        self.peak = 0

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def _called(self, name: str, argument: object = None) -> None:
        self.calls.append((name, argument, threading.get_ident()))

    def set_device(self, device: torch.device) -> None:
        self._called("set_device", device)

    def set_compile_mode(self, *, jit_compile: bool) -> None:
        self._called("set_compile_mode", jit_compile)

    def get_device_name(self, index: int) -> str:
        return self.soc

    def is_bf16_supported(self) -> bool:
        return False

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 40 * GIB, 64 * GIB

    def empty_cache(self) -> None:
        self._called("empty_cache")

    def synchronize(self, device: torch.device) -> None:
        self._called("synchronize")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated


def _named(kind: str, index: int) -> Any:
    """torch.device, which knows "npu" only with torch-npu."""
    return (kind, index)


def made(monkeypatch: pytest.MonkeyPatch, soc: str = "Ascend910B4", index: int = 0) -> tuple[NpuDevice, FakeNpu]:
    npu = FakeNpu(soc)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "device", _named)
        return NpuDevice(index), npu


def test_it_says_what_it_is_and_what_it_has(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device, _ = made(monkeypatch, index=1)
    assert device.name == "npu:1"
    assert "npu:1 is Ascend910B4, Atlas A2 (Ascend 910B), with torch 2." in caplog.text
    assert "operators of torch-npu: " in caplog.text


def test_each_thread_is_bound_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, npu = made(monkeypatch)
    npu.calls.clear()
    thread = threading.Thread(target=device.bind_thread)
    thread.start()
    thread.join()
    assert [call[:2] for call in npu.calls] == [("set_device", ("npu", 0)), ("set_compile_mode", False)]
    assert {ident for _, _, ident in npu.calls} == {thread.ident}


def test_memory_is_given_back_from_a_thread_that_was_never_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    device, npu = made(monkeypatch)
    npu.calls.clear()
    device.release_memory()
    assert npu.names() == ["set_device", "empty_cache"]


@pytest.mark.parametrize(
    ("soc", "stored", "chosen"),
    [
        ("Ascend910B4", torch.float16, torch.float16),
        ("Ascend910B4", torch.bfloat16, torch.bfloat16),
        ("Ascend910B4", torch.float32, torch.bfloat16),
        ("Ascend910_9392", torch.float32, torch.bfloat16),
        ("Ascend310P3", torch.float16, torch.float16),
        ("Ascend310P3", torch.bfloat16, torch.float16),
        ("Ascend310P3", torch.float32, torch.float16),
        ("Ascend777", torch.bfloat16, torch.float16),
    ],
)
def test_auto_takes_a_half_precision_that_the_chip_has(
    monkeypatch: pytest.MonkeyPatch, soc: str, stored: torch.dtype, chosen: torch.dtype
) -> None:
    assert made(monkeypatch, soc)[0].default_dtype(stored) is chosen


def test_a_conversion_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device, _ = made(monkeypatch, "Ascend310P3")
    caplog.set_level(logging.INFO)
    device.default_dtype(torch.bfloat16)
    assert "bfloat16 weights are converted to float16: Ascend310P3 has no bfloat16" in caplog.text


def test_bfloat16_is_refused_where_the_chip_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = made(monkeypatch, "Ascend310P3")
    with pytest.raises(ConfigurationError, match=r"dtype is bfloat16, which npu:0 \(Ascend310P3\) does not compute in"):
        device.check_dtype(torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        device.check_dtype(dtype)
    made(monkeypatch)[0].check_dtype(torch.bfloat16)


def test_the_cache_gets_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = made(monkeypatch)
    assert device.available_memory() == 40 * GIB
    assert 0.8 * 40 * GIB < device.default_cache_memory() < 0.9 * 40 * GIB


def test_the_peak_is_what_a_run_needs_beyond_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    device, npu = made(monkeypatch)
    npu.allocated = 10 * GIB

    def run() -> None:
        npu.allocated += GIB
        npu.peak = npu.allocated + 3 * GIB

    assert device.measure_peak(run) == 3 * GIB
    assert npu.names()[-2:] == ["synchronize", "empty_cache"]


def test_where_the_fused_tier_cannot_serve_the_portable_one_is_offered_alone_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, _ = made(monkeypatch, "Ascend310P3")
    caplog.set_level(logging.INFO)
    tiers = device.attention_tiers([AttentionNeeds(8, 2, 128, 128)], torch.float16)
    assert [tier.name for tier in tiers] == ["portable"]
    assert "attention on npu:0 is the portable one: Ascend 310P has no fused paged attention" in caplog.text


@pytest.mark.usefixtures("npu")
def test_the_fused_tier_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = made(monkeypatch)
    monkeypatch.setattr(device, "torch_device", torch.empty(0).device)
    tiers = device.attention_tiers([AttentionNeeds(8, 2, 128, 128)], torch.float16)
    assert [(tier.name, tier.block_size) for tier in tiers] == [("npu-fused", 128), ("portable", 16)]
    assert [tier.name for tier in device.attention_tiers([AttentionNeeds(8, 2, 256, 256)], torch.float16)] == [
        "portable"
    ]


@pytest.mark.usefixtures("npu")
def test_it_fuses_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, npu = made(monkeypatch)
    model = build_model("llama")
    assert device.fuse(model, ()) == {}
    npu.calls.clear()
    assert list(device.fuse(model, ("swiglu", "rms_norm"))) == ["rms_norm", "swiglu"]
    # What merged weights leave behind is given back before the cache is sized.
    assert npu.names() == ["empty_cache"]


def test_the_setting_knows_every_fusion() -> None:
    assert set(NPU_FUSIONS) == set(FUSIONS)


@pytest.mark.parametrize(
    ("setting", "state", "name"),
    [
        ("auto", NpuState.USABLE, "npu:0"),
        ("npu", NpuState.USABLE, "npu:0"),
        ("npu:1", NpuState.USABLE, "npu:1"),
        ("cpu", NpuState.USABLE, "cpu"),
        ("auto", NpuState.NOT_INSTALLED, "cpu"),
        ("auto", NpuState.NO_DEVICE, "cpu"),
    ],
)
def test_auto_is_an_npu_when_one_can_be_used(
    monkeypatch: pytest.MonkeyPatch, setting: str, state: NpuState, name: str
) -> None:
    made(monkeypatch)
    monkeypatch.setattr("tengserve_backend.devices.select.NpuDevice", lambda index: made(monkeypatch, index=index)[0])
    readiness = NpuReadiness(state, "none", 2 if state is NpuState.USABLE else 0)
    monkeypatch.setattr("tengserve_backend.devices.select.import_torch", lambda: readiness)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(setting).name == name


def test_an_npu_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch)
    monkeypatch.setattr(
        "tengserve_backend.devices.select.import_torch", lambda: NpuReadiness(NpuState.USABLE, devices=2)
    )
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigurationError, match=r"the process sees NPUs 0 to 1: ASCEND_RT_VISIBLE_DEVICES is \"4,5\""):
        select_device("npu:4")
    monkeypatch.setattr(
        "tengserve_backend.devices.select.import_torch", lambda: NpuReadiness(NpuState.NO_CANN, "CANN is missing")
    )
    with pytest.raises(ConfigurationError, match="device is 'npu:0', but CANN is missing"):
        select_device("npu:0")


def test_a_device_that_fails_as_it_is_taken_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("npuSynchronizeDevice: NPU function error: secret, error code is 507015")

    monkeypatch.setattr("tengserve_backend.devices.select.import_torch", lambda: NpuReadiness(NpuState.USABLE, "", 1))
    npu = FakeNpu("Ascend910B4")
    npu.set_device = fail
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "device", _named)
    with pytest.raises(DeviceLostError, match=r"^The device npu:0 failed\.$") as lost:
        select_device("npu")
    assert "NPU error 507015: a kernel failed on the device" in caplog.text
    # The self-check's report has the number too.
    assert "NPU error 507015: a kernel failed" in said(lost.value)


def test_a_device_that_only_refuses_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("NPU function error: error code is 207005")

    monkeypatch.setattr("tengserve_backend.devices.select.import_torch", lambda: NpuReadiness(NpuState.USABLE, "", 1))
    npu = FakeNpu("Ascend910B4")
    npu.set_device = refuse
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "device", _named)
    with pytest.raises(RuntimeError, match="207005"):
        select_device("npu")
