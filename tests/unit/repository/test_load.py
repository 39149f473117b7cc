from __future__ import annotations

from pathlib import Path

import pytest

from tengserve_backend.engine import load as engine_load
from tengserve_backend.repository import load
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource


@pytest.mark.parametrize(
    ("own", "of_the_server", "chosen"),
    [("auto", "npu:1", "npu:1"), ("auto", "auto", "auto"), ("cpu", "npu:1", "cpu"), ("npu:0", "cpu", "npu:0")],
)
def test_the_servers_device_is_for_models_that_name_none(
    monkeypatch: pytest.MonkeyPatch, own: str, of_the_server: str, chosen: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(load, "resolve_weights", lambda source, progress: Path())
    monkeypatch.setattr(engine_load, "load_engine", lambda source, *_, **__: asked.append(source.settings.device))
    source = ModelSource("m", "1", Path(), ModelSettings(device=own))
    load.load_model(source, lambda stage, fraction: None, device=of_the_server)
    assert asked == [chosen]
