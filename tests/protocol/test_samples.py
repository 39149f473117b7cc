"""The samples of the three API documents, sent and answered as printed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine, model_info
from tengserve_backend.generation import Finish, FinishReason, TokenEvent

SAMPLES = Path(__file__).parent / "samples"
V2 = "/v2/models/llama_65b/generate"
REASONS = {"length": FinishReason.LENGTH, "eos_token": FinishReason.EOS, "stop_sequence": FinishReason.STOP}


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def ordered(text: str) -> Any:
    """JSON with the order of keys kept, and times to the microsecond that a clock can mean."""
    return json.loads(text, object_pairs_hook=list, parse_float=lambda digits: round(float(digits), 3))


def events_of(stream: str) -> list[str]:
    return [line.removeprefix("data: ") for line in stream.splitlines() if line]


def script_of(stream: str, *, full_text: bool) -> list[TokenEvent]:
    """The engine's events behind a printed stream."""
    script: list[TokenEvent] = []
    shown = ""
    for event in map(json.loads, events_of(stream)):
        latency = event["decode_time"] if event["prefill_time"] is None else event["prefill_time"]
        token_id = event["token"]["id"]
        token_id = token_id[0] if isinstance(token_id, list) else token_id
        finish = None
        if "generated_text" in event:
            details = event["details"] or {"finish_reason": "length", "generated_tokens": 5, "seed": 1}
            finish = Finish(REASONS[details["finish_reason"]], 7, details["generated_tokens"], details["seed"])
            text = event["generated_text"].removeprefix(shown)
        else:
            text = event["token"]["text"].removeprefix(shown) if full_text else event["token"]["text"]
        shown += text
        script.append(TokenEvent(token_id, text, latency, finish))
    return script


def answer_of(text: str, details: dict[str, Any]) -> list[TokenEvent]:
    finish = Finish(REASONS[details["finish_reason"]], 7, details["generated_tokens"], details.get("seed", 123))
    return [TokenEvent(1, text, 10.0, finish)]


@pytest.mark.parametrize("name", ["infer", "infer_token"])
async def test_native_text(name: str) -> None:
    expected = json.loads(sample(f"{name}.response.json"))
    engine = FakeEngine(answer_of(expected["generated_text"], expected["details"]))
    async with client_of(app_with(engine)) as client:
        response = await client.post(f"/{name}", content=sample(f"{name}.request.json"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert ordered(response.text) == ordered(sample(f"{name}.response.json"))

    request = engine.requests[0]
    assert request.prompt == ("My name is Olivier and I" if name == "infer" else (5618, 19678, 701, 9072, 13))
    assert (request.max_new_tokens, request.priority, request.timeout_s) == (20, 5, 10.0)
    sampling = request.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p) == (True, 0.5, 10, 0.95)
    assert (sampling.repetition_penalty, sampling.seed) == (1.03, None)


@pytest.mark.parametrize(
    ("name", "kind", "details"),
    [("infer", "stream", True), ("infer_token", "stream", True), ("infer", "stream_full_text", False)],
)
async def test_native_stream(name: str, kind: str, details: bool) -> None:
    full_text = kind == "stream_full_text"
    stream = sample(f"{name}.{kind}.txt")
    engine = FakeEngine(script_of(stream, full_text=full_text), info=model_info(full_text_enabled=full_text))
    body = json.loads(sample(f"{name}.request.json"))
    body["stream"] = True
    body["parameters"]["details"] = details
    async with client_of(app_with(engine)) as client:
        response = await client.post(f"/{name}", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.endswith("\n\n")
    assert [ordered(event) for event in events_of(response.text)] == [ordered(event) for event in events_of(stream)]


@pytest.mark.parametrize("path", [V2, "/v2/models/llama_65b/versions/1/generate"])
async def test_v2_generate(path: str) -> None:
    expected = json.loads(sample("v2_generate.response.json"))
    engine = FakeEngine(answer_of(expected["text_output"], expected["details"]), info=model_info("llama_65b"))
    async with client_of(app_with(engine)) as client:
        response = await client.post(path, content=sample("v2_generate.request.json"))
    assert response.status_code == 200
    printed = ordered(sample("v2_generate.response.json"))
    # The document's details, in its order, and then the seed, which is always told.
    assert printed[-1][0] == "details"
    printed[-1][1].append(("seed", 123))
    assert json.dumps(ordered(response.text)) == json.dumps(printed)

    request = engine.requests[0]
    assert (request.request_id, request.prompt, request.max_new_tokens) == ("a123", "My name is Olivier and I", 200)
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.top_p) == (123, 2147483647, 0.99)


async def test_v2_sample_with_flat_fields_means_the_same() -> None:
    body = json.loads(sample("v2_generate.request.json"))
    engine = FakeEngine(info=model_info("llama_65b"))
    async with client_of(app_with(engine)) as client:
        nested = await client.post(V2, json=body)
        flat = await client.post(V2, json={**body, **body["parameters"], "parameters": None})
    assert nested.json() == flat.json()
    assert engine.requests[0] == engine.requests[1]


async def test_v2_stream() -> None:
    body = json.loads(sample("v2_generate.request.json"))
    script = [
        TokenEvent(1, "am", 45.54),
        TokenEvent(2, " living", 16.8, Finish(FinishReason.EOS, 7, 2, 123)),
    ]
    engine = FakeEngine(script, info=model_info("llama_65b"))
    async with client_of(app_with(engine)) as client:
        response = await client.post("/v2/models/llama_65b/generate_stream", json=body)
    head = '"id":"a123","model_name":"llama_65b","model_version":null'
    costs = '"first_token_cost":null,"decode_cost":null'
    assert response.text == (
        f'data: {{{head},"text_output":"am","details":{{"generated_tokens":1,{costs}}},'
        f'"prefill_time":45.54,"decode_time":null}}\n\n'
        f'data: {{{head},"text_output":" living",'
        f'"details":{{"finish_reason":"eos_token","generated_tokens":2,{costs},"seed":123}},'
        f'"prefill_time":null,"decode_time":16.8}}\n\n'
    )


async def test_v2_stream_without_details_has_neither_details_nor_times() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post("/v2/models/smollm2/generate_stream", json={"id": "x", "text_input": "Hi"})
    first, last = events_of(response.text)
    assert first == '{"id":"x","model_name":"smollm2","model_version":null,"text_output":"Hello"}'
    assert last == '{"id":"x","model_name":"smollm2","model_version":null,"text_output":" world"}'


async def test_v2_stream_repeats_the_text_with_full_text_enabled() -> None:
    engine = FakeEngine(info=model_info(full_text_enabled=True))
    async with client_of(app_with(engine)) as client:
        response = await client.post("/v2/models/smollm2/generate_stream", json={"text_input": "Hi"})
    assert [json.loads(event)["text_output"] for event in events_of(response.text)] == ["Hello", "Hello world"]


async def test_text_answer_has_no_details_unless_asked() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        native = await client.post("/infer", json={"inputs": "Hi"})
        v2 = await client.post("/v2/models/smollm2/generate", json={"id": "x", "text_input": "Hi"})
    assert native.text == '{"generated_text":"Hello world"}'
    assert v2.text == '{"id":"x","model_name":"smollm2","model_version":null,"text_output":"Hello world"}'


async def test_multimodal_sample_is_refused_clearly() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post("/infer", content=sample("infer_multimodal.request.json"))
    assert response.status_code == 422
    assert "inputs" in response.json()["error"]
    assert "not served yet" in response.json()["error"]
