"""Prompts, ids, names: what identifies a request and what it continues."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client import REGISTRY

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine, FakeState, FakeStatus, model_info, tokens
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend.generation import ModelLimits

V2 = "/v2/models/smollm2/generate"


async def post(path: str, content: str, engine: FakeEngine, settings: HttpSettings | None = None) -> tuple[int, str]:
    async with client_of(app_with(engine, settings=settings)) as client:
        response = await client.post(path, content=content.encode("utf-8", "surrogatepass"))
    return response.status_code, response.text


@pytest.mark.parametrize("path", ["/infer", "/infer_token"])
async def test_both_native_urls_take_text_and_ids(path: str) -> None:
    engine = FakeEngine()
    assert (await post(path, '{"inputs":"你好"}', engine))[0] == 200
    assert (await post(path, '{"input_id":[0,1048576]}', engine))[0] == 200
    assert (await post(path, '{"inputs":null,"input_id":[5]}', engine))[0] == 200
    assert (await post(path, '{"inputs":" \\n ","input_id":null}', engine))[0] == 200
    assert [request.prompt for request in engine.requests] == ["你好", (0, 1048576), (5,), " \n "]


@pytest.mark.parametrize(
    ("path", "token_id"),
    [("/infer", 100), ("/infer_token", [100])],
)
async def test_the_url_decides_the_shape_of_token_ids(path: str, token_id: object) -> None:
    for prompt in ('"inputs":"Hi"', '"input_id":[1]'):
        _, text = await post(path, f'{{{prompt},"stream":true}}', FakeEngine(tokens("Hi")))
        assert json.loads(text.removeprefix("data: "))["token"]["id"] == token_id


@pytest.mark.parametrize(
    ("path", "content", "error"),
    [
        ("/infer", "{}", "Parameter inputs is required."),
        ("/infer_token", "{}", "Parameter input_id is required."),
        ("/infer", '{"inputs":null}', "Parameter inputs must not be null."),
        ("/infer", '{"input_id":null}', "Parameter input_id must not be null."),
        ("/infer_token", '{"input_id":null}', "Parameter input_id must not be null."),
        ("/infer", '{"inputs":"a","input_id":[1]}', "Input conflict: give inputs or input_id, not both."),
        ("/infer", '{"inputs":""}', "Parameter inputs must have a number of characters in [1, 4194304], got 0."),
        ("/infer", '{"inputs":7}', "inputs must be string type, got 7."),
        ("/infer", '{"inputs":{}}', "inputs must be string type, got an object."),
        ("/infer", '{"inputs":true}', "inputs must be string type, got true."),
        (
            "/infer",
            '{"inputs":"a\\ud800"}',
            "Failed to parse request context to json: a lone surrogate at byte 12 is no text.",
        ),
        ("/infer", '{"inputs":[]}', "inputs must be a string, got an array: multimodal"),
        ("/infer_token", '{"input_id":[]}', "Parameter input_id must have a number of elements in [1, 1048576], got 0"),
        ("/infer_token", '{"input_id":"1"}', 'input_id must be array type, got "1".'),
        ("/infer_token", '{"input_id":5}', "input_id must be array type, got 5."),
        ("/infer_token", '{"input_id":[1,2.0]}', "input_id[1] must be integer type, got 2.0."),
        ("/infer_token", '{"input_id":[true]}', "input_id[0] must be integer type, got true."),
        ("/infer_token", '{"input_id":[1,null]}', "input_id[1] must be integer type, got null."),
        ("/infer_token", '{"input_id":[[1]]}', "input_id[0] must be integer type, got an array of 1."),
        ("/infer_token", '{"input_id":[3,-1]}', "Parameter input_id[1] must be in [0, 1048576], got -1."),
        ("/infer_token", '{"input_id":[1048577]}', "Parameter input_id[0] must be in [0, 1048576], got 1048577."),
        (V2, "{}", "Parameter text_input is required."),
        (V2, '{"text_input":null}', "Parameter text_input must not be null."),
        (V2, '{"text_input":""}', "Parameter text_input must have a number of characters in [1, 16000], got 0."),
        (V2, '{"text_input":["a","b"]}', "text_input must be a string, got an array: multimodal"),
        (V2, '{"text_input":"a","id":""}', "Parameter id must have a number of characters in [1, 256], got 0."),
        (V2, '{"text_input":"a","id":7}', "id must be string type, got 7."),
        (V2, '{"text_input":"a","id":"a\\nb"}', "Parameter id must be printable characters"),
    ],
)
async def test_refused(path: str, content: str, error: str) -> None:
    engine = FakeEngine()
    status, text = await post(path, content, engine)
    assert status == 422
    assert json.loads(text)["error"].startswith(error)
    assert not engine.requests


async def test_text_limits_are_settings() -> None:
    settings = HttpSettings(max_infer_text_chars=3, max_generate_text_chars=2)
    for path, content, expected in (
        ("/infer", '{"inputs":"你好吗"}', 200),
        ("/infer", '{"inputs":"abcd"}', 422),
        (V2, '{"text_input":"你好"}', 200),
        (V2, '{"text_input":"abc"}', 422),
    ):
        status, _ = await post(path, content, FakeEngine(), settings)
        assert status == expected, content


async def test_the_documented_text_limits() -> None:
    for path, field, limit in (("/infer", "inputs", 4194304), (V2, "text_input", 16000)):
        for length, expected in ((limit, 200), (limit + 1, 422)):
            status, _ = await post(path, json.dumps({field: "x" * length}), FakeEngine())
            assert status == expected


async def test_more_token_ids_than_any_model_takes() -> None:
    engine = FakeEngine()
    assert (await post("/infer_token", '{"input_id":[' + "7," * 1048575 + "7]}", engine))[0] == 200
    assert len(engine.requests[0].prompt) == 1048576
    assert (await post("/infer_token", '{"input_id":[' + "7," * 1048576 + "7]}", engine))[0] == 422


async def test_v2_prompts_leave_room_for_the_longest_answer() -> None:
    for max_iter_times, expected in ((512, 2048), (2559, 1), (2560, None), (4000, None)):
        limits = ModelLimits(max_seq_len=2560, max_input_len=2500, max_iter_times=max_iter_times)
        engine = FakeEngine(info=model_info(limits=limits))
        await post(V2, '{"text_input":"a"}', engine)
        await post("/infer", '{"inputs":"a"}', engine)
        assert [request.max_prompt_tokens for request in engine.requests] == [expected, None]


async def test_v2_same_field_twice() -> None:
    engine = FakeEngine()
    for content, expected in (
        ('{"text_input":"a","top_k":5,"parameters":{"top_k":5}}', 200),
        ('{"text_input":"a","temperature":1,"parameters":{"temperature":1.0}}', 200),
        ('{"text_input":"a","top_k":null,"parameters":{"top_k":5}}', 200),
        ('{"text_input":"a","top_k":5,"parameters":{"top_k":null}}', 200),
        ('{"text_input":"a","top_k":5,"parameters":{"top_k":6}}', 422),
        ('{"text_input":"a","details":true,"parameters":{"details":1}}', 422),
        ('{"text_input":"a","stop":"x","parameters":{"stop":["x"]}}', 200),
        ('{"text_input":"a","stop":"x","parameters":{"stop":["y"]}}', 422),
    ):
        status, text = await post(V2, content, engine)
        assert status == expected, content
        if status == 422:
            assert any(name in json.loads(text)["error"] for name in ("top_k", "details", "stop"))
    assert engine.requests[2].sampling.top_k == 5


async def test_native_parameters_are_nested_only() -> None:
    engine = FakeEngine()
    assert (await post("/infer", '{"inputs":"a","max_new_tokens":"wrong"}', engine))[0] == 200
    assert engine.requests[0].max_new_tokens == 20


async def test_request_ids() -> None:
    engine = FakeEngine()
    _, given = await post(V2, '{"text_input":"a","id":"my-id"}', engine)
    _, drawn = await post(V2, '{"text_input":"a"}', engine)
    await post("/infer", '{"inputs":"a"}', engine)
    ids = [request.request_id for request in engine.requests]
    assert json.loads(given)["id"] == ids[0] == "my-id"
    assert json.loads(drawn)["id"] == ids[1]
    assert len(set(ids)) == 3
    assert all(ids)


async def test_unknown_fields_are_ignored_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("tengserve_ignored_fields_total", {"endpoint": "/infer"}) or 0.0

    before = count()
    content = json.dumps(
        {"inputs": "a", "model": "x", "n" * 1000: 1, "parameters": {"best_of": 3, "text_input": "b"}, "top_k": 0}
    )
    with caplog.at_level(logging.DEBUG, logger="tengserve_adapter"):
        assert (await post("/infer", content, FakeEngine()))[0] == 200
    assert count() - before == 5
    assert "best_of" in caplog.text
    assert "n" * 100 not in caplog.text


async def test_models_by_url() -> None:
    first, second = FakeEngine(info=model_info("first")), FakeEngine(info=model_info("second"))
    loading = FakeStatus("third", "1", FakeState.LOADING)
    app = app_with(first, second, others=(loading,), settings=HttpSettings(default_model="second"))
    async with client_of(app) as client:
        assert (await client.post("/infer", json={"inputs": "a"})).status_code == 200
        assert (await client.post("/v2/models/first/generate", json={"text_input": "a"})).status_code == 200
        assert (await client.post("/v2/models/first/versions/1/generate", json={"text_input": "a"})).status_code == 200
        assert (len(first.requests), len(second.requests)) == (2, 1)

        unknown = await client.post("/v2/models/nobody/generate_stream", content=b"not even json")
        assert (unknown.status_code, unknown.json()) == (
            404,
            {"error": "Model nobody not found; this server has first, second, third.", "error_type": "NotFoundError"},
        )
        near = await client.post("/v2/models/fist/generate", json={"text_input": "a"})
        assert (near.status_code, near.json()["error"]) == (404, "Model fist not found; did you mean first?")
        version = await client.post("/v2/models/first/versions/9/generate", json={"text_input": "a"})
        assert (version.status_code, version.json()["error"]) == (404, "Model first version 9 not found.")
        early = await client.post("/v2/models/third/generate", json={"text_input": "a"})
        assert (early.status_code, early.json()["error_type"]) == (503, "Service Unavailable")
        assert int(early.headers["retry-after"]) > 0


async def test_infer_without_a_default_model() -> None:
    app = app_with(FakeEngine(info=model_info("first")), FakeEngine(info=model_info("second")))
    async with client_of(app) as client:
        response = await client.post("/infer", json={"inputs": "a"})
    assert response.status_code == 404
    assert "--default-model" in response.json()["error"]
    async with client_of(app_with()) as client:
        response = await client.post("/infer_token", json={"input_id": [1]})
    assert (response.status_code, response.json()["error"]) == (404, "This server has no model.")
