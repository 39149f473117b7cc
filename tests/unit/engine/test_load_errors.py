"""What a load says when the device does not go along."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_model import build_tiny_model
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine import load
from tengserve_backend.errors import ConfigurationError, DeviceLostError
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource


class FailingDevice(CpuDevice):
    """A device that raises one error as soon as a model is on it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fuse(self, model: object, wanted: object) -> list[str]:
        raise self._error

    def is_fault(self, error: BaseException) -> bool:
        return "lost" in str(error)

    def explain(self, error: BaseException) -> str:
        return "Buy a new one."


def loaded_on(device: FailingDevice, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "select_device", lambda setting: device)
    build_tiny_model(folder)
    load.load_engine(ModelSource("m", "1", folder, ModelSettings()), folder, lambda stage, fraction: None)


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


def test_any_other_error_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        loaded_on(FailingDevice(ZeroDivisionError()), tmp_path, monkeypatch)
