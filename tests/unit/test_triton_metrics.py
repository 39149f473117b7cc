"""Triton's metrics on the page, as a dashboard made for Triton reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.echo_model import EchoModel
from tengserve_adapter.observability.triton_metrics import TritonCollector
from tengserve_backend.inference import FailureReason, ModelStatistics
from tengserve_backend.repository.live import LiveRepository
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.overlays import Overlays
from tengserve_backend.repository.source import ModelSource, Progress

SEEN = ModelStatistics(
    inference_count=12,
    execution_count=3,
    success=(5, 50_999),
    fail=(3, 1),
    queue=(5, 10_000),
    compute_input=(5, 2_000),
    compute_infer=(5, 30_000),
    compute_output=(5, 4_000),
    cancel=(2, 1),
    failures={FailureReason.REJECTED: 1, FailureReason.BACKEND: 2},
    pending=7,
)


class Counted(EchoModel):
    def statistics(self) -> ModelStatistics:
        return SEEN


def load(source: ModelSource, progress: Progress) -> Counted:
    return Counted(source)


class Served:
    def __init__(self, root: Path) -> None:
        for name in ("one", "two"):
            (root / name / "1").mkdir(parents=True)
            (root / name / "1" / "model.py").touch()
            (root / name / "config.pbtxt").write_text('backend: "python"')
        overlays = Overlays()
        self.manager = ModelManager([], load, released=overlays.release)
        self.manager.load_all()
        self.live = LiveRepository(root, ControlMode.EXPLICIT, self.manager, overlays)
        self.registry = CollectorRegistry()
        self.registry.register(TritonCollector(self.manager))

    def page(self) -> list[str]:
        return generate_latest(self.registry).decode().splitlines()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.manager.stop()


def test_every_number_has_its_name_and_unit(served: Served) -> None:
    served.live.load("one")
    numbers = {
        "request_success": 5,
        "count": 12,
        "exec_count": 3,
        "request_duration_us": 50,
        "queue_duration_us": 10,
        "compute_input_duration_us": 2,
        "compute_infer_duration_us": 30,
        "compute_output_duration_us": 4,
        "pending_request_count": 7,
    }
    reasons = {"REJECTED": 1, "CANCELED": 2, "BACKEND": 2, "OTHER": 0}
    assert {line for line in served.page() if not line.startswith("#")} == {
        *(f'nv_inference_{name}{{model="one",version="1"}} {float(value)}' for name, value in numbers.items()),
        *(
            f'nv_inference_request_failure{{model="one",reason="{reason}",version="1"}} {float(value)}'
            for reason, value in reasons.items()
        ),
    }


def test_a_model_that_is_not_loaded_has_no_series(served: Served) -> None:
    def models() -> set[str]:
        return {line.split('model="')[1].split('"')[0] for line in served.page() if not line.startswith("#")}

    assert models() == set()
    served.live.load("one")
    served.live.load("two")
    assert models() == {"one", "two"}
    served.live.unload("one")
    assert models() == {"two"}
