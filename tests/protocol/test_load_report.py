"""The header that tells a gateway how busy an engine is."""

from __future__ import annotations

import json

import pytest

from support.asgi import app_with, client_of
from support.engine_status import engine_status
from support.fake_engine import FakeEngine
from tengserve_backend.engine.base import EngineStatus
from tengserve_backend.errors import ModelNotReadyError

ENDPOINTS = [
    ("/v2/models/smollm2/generate", {"text_input": "a"}),
    ("/v2/models/smollm2/generate_stream", {"text_input": "a"}),
    ("/infer", {"inputs": "a"}),
    ("/infer_token", {"input_id": [1], "stream": True}),
]


class BusyEngine(FakeEngine):
    def status(self) -> EngineStatus:
        return engine_status(total_blocks=8, free_blocks=5, cached_blocks=1, block_size=16)


class UnloadedEngine(FakeEngine):
    def status(self) -> EngineStatus:
        raise ModelNotReadyError("unloaded")


async def header(engine: FakeEngine, path: str, body: dict[str, object], form: str | None) -> str | None:
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    async with client_of(app_with(engine)) as client:
        response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200
    assert response.text
    found: str | None = response.headers.get("endpoint-load-metrics")
    return found


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_the_load_is_told_in_the_form_that_is_asked_for(path: str, body: dict[str, object]) -> None:
    told = await header(BusyEngine(), path, body, "json")
    assert told is not None
    kind, _, text = told.partition(" ")
    assert (kind, json.loads(text)) == (
        "JSON",
        {"named_metrics": {"kv_cache_utilization": 0.25, "max_token_capacity": 128}},
    )
    assert await header(BusyEngine(), path, body, "text") == (
        "TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=128"
    )


@pytest.mark.parametrize("form", [None, "", "protobuf", "JSON"])
async def test_nothing_is_told_that_was_not_asked_for(form: str | None) -> None:
    assert await header(BusyEngine(), *ENDPOINTS[0], form) is None


async def test_a_model_without_a_status_answers_all_the_same() -> None:
    assert await header(UnloadedEngine(), *ENDPOINTS[0], "json") is None
