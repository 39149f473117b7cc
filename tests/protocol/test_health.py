"""Health and metadata: honest while a model loads, fails, drains or dies."""

from __future__ import annotations

import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine, FakeState, FakeStatus, model_info
from support.tensor_models import plain_models
from tengserve_adapter.http.settings import HttpSettings

LOADING = FakeStatus("slow", "1", FakeState.LOADING)
UNLOADING = FakeStatus("old", "1", FakeState.UNLOADING)
UNLOADED = FakeStatus("old", "1", FakeState.UNAVAILABLE, "unloaded")
FAILED = FakeStatus("broken", "1", FakeState.UNAVAILABLE, "Weights are damaged.")


def dead() -> FakeEngine:
    engine = FakeEngine()
    engine.failure = "The device is gone."
    return engine


def stuck(seconds: float) -> FakeEngine:
    engine = FakeEngine()
    engine.seconds_since_step = seconds
    return engine


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_healthy(method: str) -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for path in (
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/smollm2/ready",
            "/v2/models/smollm2/versions/1/ready",
        ):
            response = await client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("models", "others", "draining", "live", "ready", "reason"),
    [
        ([], (LOADING,), False, 200, 503, "Model slow is loading."),
        ([FakeEngine()], (LOADING,), False, 200, 200, ""),
        ([], (UNLOADING,), False, 200, 503, "Model old is unloading."),
        ([FakeEngine()], (UNLOADING,), False, 200, 200, ""),
        ([], (FAILED,), False, 200, 503, "Model broken: Weights are damaged."),
        ([], (), False, 200, 503, "This server has no model."),
        ([], (UNLOADED,), False, 200, 503, "This server has no model."),
        ([FakeEngine()], (UNLOADED,), False, 200, 200, ""),
        ([FakeEngine()], (FAILED,), False, 200, 200, ""),
        ([FakeEngine()], (), True, 200, 503, "The service is stopping."),
        ([dead()], (), False, 503, 503, "Model smollm2: The device is gone."),
        ([stuck(120.0)], (), False, 200, 200, ""),
        ([stuck(121.0)], (), False, 503, 503, "Model smollm2: a step has been running for 121 s."),
    ],
)
async def test_live_and_ready(
    models: list[FakeEngine], others: tuple[FakeStatus, ...], draining: bool, live: int, ready: int, reason: str
) -> None:
    async with client_of(app_with(*models, others=others, draining=draining)) as client:
        for path, expected in (("/v2/health/live", live), ("/v2/health/ready", ready)):
            response = await client.get(path)
            assert response.status_code == expected
            if expected == 200:
                assert response.content == b""
            else:
                assert response.json() == {"error": reason, "error_type": "Service Unavailable"}


@pytest.mark.parametrize(
    ("others", "status"),
    [
        ((), 200),
        ((UNLOADED,), 200),
        ((UNLOADING,), 200),
        ((LOADING,), 503),
        ((FAILED,), 503),
        ((UNLOADED, FAILED), 503),
    ],
)
async def test_a_server_that_loads_by_request_is_ready_without_a_model(
    others: tuple[FakeStatus, ...], status: int
) -> None:
    app = app_with(others=others, settings=HttpSettings(ready_without_models=True))
    async with client_of(app) as client:
        assert (await client.get("/v2/health/ready")).status_code == status
    app = app_with(others=others, settings=HttpSettings(ready_without_models=True), started=False)
    async with client_of(app) as client:
        assert (await client.get("/v2/health/ready")).status_code == 503


async def test_while_the_server_starts_it_waits_for_every_model() -> None:
    async with client_of(app_with(FakeEngine(), others=(LOADING,), started=False)) as client:
        response = await client.get("/v2/health/ready")
    assert (response.status_code, response.json()["error"]) == (503, "Model slow is loading.")


async def test_model_ready() -> None:
    async with client_of(app_with(FakeEngine(), others=(LOADING,))) as client:
        assert (await client.get("/v2/models/slow/ready")).status_code == 503
        assert (await client.get("/v2/models/smollm2/versions/2/ready")).status_code == 404
        for path in ("/v2/models/nobody/ready", "/v2/models/nobody"):
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]) == (
                404,
                "Request for unknown model: 'nobody' is not found",
            )
        response = await client.get("/v2/models/smollm2/versions/99")
        assert response.json()["error"] == "Request for unknown model: 'smollm2' version 99 is not found"
    async with client_of(app_with(dead())) as client:
        assert (await client.get("/v2/models/smollm2/ready")).status_code == 503
    async with client_of(app_with(FakeEngine(), draining=True)) as client:
        assert (await client.get("/v2/models/smollm2/ready")).status_code == 503


async def test_server_metadata() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        metadata = (await client.get("/v2")).json()
    assert list(metadata) == ["name", "version", "extensions"]
    assert metadata["name"] == "tengserve"
    assert metadata["extensions"] == [
        "classification",
        "sequence",
        "model_repository",
        "schedule_policy",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "logging",
        "generate",
    ]


@pytest.mark.parametrize("path", ["/v2/models/smollm2", "/v2/models/smollm2/versions/1"])
async def test_model_metadata(path: str) -> None:
    async with client_of(app_with(FakeEngine(), FakeEngine(info=model_info("other")))) as client:
        response = await client.get(path)
    metadata = response.json()
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("smollm2", ["1"], "tengserve")
    assert metadata["inputs"][:2] == [
        {"name": "text_input", "datatype": "BYTES", "shape": [1]},
        {"name": "input_ids", "datatype": "INT32", "shape": [-1]},
    ]
    assert metadata["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [-1]}


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_a_model_of_tensors_is_asked_whether_it_is_ready(ready: bool, status: int) -> None:
    model = plain_models()["simple"]
    model.ready = ready
    async with client_of(app_with(tensor_models=[model])) as client:
        assert (await client.get("/v2/models/simple/ready")).status_code == status
        response = await client.get("/v2/models/simple")
    shape = [-1, 16]
    assert response.json() == {
        "name": "simple",
        "versions": [],
        "platform": "python",
        "inputs": [{"name": f"INPUT{index}", "datatype": "INT32", "shape": shape} for index in range(2)],
        "outputs": [{"name": f"OUTPUT{index}", "datatype": "INT32", "shape": shape} for index in range(2)],
    }


async def test_metadata_of_a_model_that_is_not_there() -> None:
    async with client_of(app_with(others=(LOADING,))) as client:
        assert (await client.get("/v2/models/slow")).status_code == 503
        assert (await client.get("/v2/models/nobody")).status_code == 404
        assert (await client.get("/v2/models/slow/versions/7")).status_code == 404
