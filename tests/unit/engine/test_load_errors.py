"""What a load says when the device does not go along."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.tiny_model import build_tiny_model
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine import load
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import ConfigurationError, DeviceLostError
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import UNLIMITED, AttentionTier, TierLimits
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource


class FailingDevice(CpuDevice):
    """A device that raises one error as soon as a model is on it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def fuse(self, model: object, wanted: object) -> list[str]:
        raise self._error

    def is_fault(self, error: BaseException) -> bool:
        return "lost" in str(error)

    def explain(self, error: BaseException) -> str:
        return "Buy a new one."


def loaded_on(
    device: CpuDevice, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: ModelSettings | None = None
) -> NativeEngine:
    monkeypatch.setattr(load, "select_device", lambda setting, **_: device)
    build_tiny_model(folder)
    source = ModelSource("m", "1", folder, settings or ModelSettings())
    return load.load_engine(source, folder, lambda stage, fraction: None)


def test_a_device_that_is_lost_is_told_apart_and_explained_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DeviceLostError, match="The device cpu of model m failed") as caught:
        loaded_on(FailingDevice(RuntimeError("lost at /secret/path")), tmp_path, monkeypatch)
    assert "secret" not in caught.value.message
    assert "Buy a new one." in caplog.text


def test_a_model_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="the model does not fit into the memory of cpu"):
        loaded_on(FailingDevice(MemoryError()), tmp_path, monkeypatch)


class LimitedDevice(CpuDevice):
    """One whose attention does not take everything, and that measures how much memory a step needs."""

    def __init__(self, limits: TierLimits = UNLIMITED) -> None:
        super().__init__()
        self.tier = PortableAttention(128)
        self.tier.limits = limits
        self.held: list[int] = []

    def attention_tiers(self, needs: object, dtype: torch.dtype) -> list[AttentionTier]:
        return [self.tier]

    def measure_peak(self, run: Callable[[], None]) -> int:
        run()
        gc.collect()
        self.held.append(sum(held.nbytes for held in gc.get_objects() if type(held) is torch.Tensor))
        return 0

    def release_memory(self) -> None:
        gc.collect()
        self.held.append(sum(held.nbytes for held in gc.get_objects() if type(held) is torch.Tensor))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ModelSettings(max_batch_size=9, max_seq_len=64),
            "maxBatchSize allows 9 sequences in a step, .* portable takes at most 8; ",
        ),
        (
            ModelSettings(max_batch_size=8, max_seq_len=65),
            "maxSeqLen allows 65 tokens of a sequence, .* portable takes at most 64; ",
        ),
    ],
)
def test_settings_beyond_what_attention_takes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: ModelSettings, complaint: str
) -> None:
    fits = ModelSettings(max_batch_size=8, max_seq_len=64)
    device = LimitedDevice(TierLimits(sequences=8, context=64))
    loaded_on(device, tmp_path, monkeypatch, fits).stop()
    with pytest.raises(ConfigurationError, match=complaint):
        loaded_on(device, tmp_path, monkeypatch, settings)


def test_the_cache_of_the_measured_step_is_no_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LimitedDevice()
    loaded_on(device, tmp_path, monkeypatch, ModelSettings(max_batch_size=32)).stop()
    while_measured, after = device.held[:2]
    # A block for each of 32 sequences: 128 tokens, 4 layers, keys and values of 2 heads of 16 in float32.
    assert while_measured - after >= 32 * 128 * 4 * 2 * 2 * 16 * 4


def test_any_other_error_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        loaded_on(FailingDevice(ZeroDivisionError()), tmp_path, monkeypatch)
