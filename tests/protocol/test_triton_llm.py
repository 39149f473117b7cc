"""Clients of Triton's vLLM and TensorRT-LLM backends on generate, beside those of MindIE."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.asgi import app_with, client_of, sse_events
from support.fake_engine import FakeEngine, tokens
from tengserve_backend.generation import Finish, FinishReason, TokenEvent, TokenLogprobs

URL = "/v2/models/smollm2/generate"


async def post(engine: FakeEngine, content: dict[str, Any], url: str = URL) -> httpx.Response:
    async with client_of(app_with(engine)) as client:
        return await client.post(url, json=content)


async def test_the_example_of_the_vllm_backend() -> None:
    engine = FakeEngine()
    response = await post(engine, {"text_input": "What?", "parameters": {"stream": False, "temperature": 0}})
    assert response.status_code == 200
    assert response.json()["text_output"] == "Hello world"
    assert engine.requests[0].sampling.do_sample is False


async def test_the_body_of_genai_perf() -> None:
    engine = FakeEngine()
    body = {"text_input": ["What?"], "stream": True, "max_tokens": 16, "min_length": "2"}
    response = await post(engine, body, f"{URL}_stream")
    assert [event["text_output"] for event in sse_events(response.text)] == ["Hello", " world"]
    request = engine.requests[0]
    assert (request.prompt, request.max_new_tokens, request.min_new_tokens) == ("What?", 16, 2)


async def test_tensorrt_llm_names_as_scalars_or_arrays_of_one() -> None:
    values = {
        "text_input": "p",
        "max_tokens": [9],
        "top_k": [5],
        "top_p": 0.5,
        "temperature": [0.25],
        "random_seed": [3],
        "repetition_penalty": 1.5,
        "stop_words": ["a", ""],
        "bad_words": "",
        "end_id": 2,
        "pad_id": [2],
        "length_penalty": 1.0,
        "beam_width": 1,
        "return_context_logits": False,
    }
    engine = FakeEngine()
    assert (await post(engine, values)).status_code == 200
    request = engine.requests[0]
    assert (request.max_new_tokens, request.stop) == (9, ("a",))
    sampling = request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.seed) == (5, 0.5, 0.25, 3)
    assert (sampling.repetition_penalty, sampling.do_sample) == (1.5, True)


async def test_the_prompt_is_repeated_only_when_that_is_asked_for() -> None:
    for exclude, text in ((False, "Say: Hello world"), (True, "Hello world"), (None, "Hello world")):
        body = {"text_input": "Say: ", "max_tokens": 2, "exclude_input_in_output": exclude}
        assert (await post(FakeEngine(), body)).json()["text_output"] == text
    response = await post(FakeEngine(), {"text_input": "a", "exclude_input_in_output": False}, f"{URL}_stream")
    assert response.status_code == 422
    assert "When streaming, `exclude_input_in_output` = False is not allowed." in response.json()["error"]


async def test_outputs_that_are_asked_for() -> None:
    logprobs = TokenLogprobs(9, -0.5, 1, ((9, -0.5),))
    script = [TokenEvent(9, "x", 1.0, Finish(FinishReason.STOP, 7, 1, 4), logprobs)]
    flags = dict.fromkeys(
        (
            "return_finish_reason",
            "return_cumulative_logprob",
            "return_logprobs",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "details",
        ),
        True,
    )
    response = (await post(FakeEngine(script), {"id": "r", "text_input": "p", "parameters": flags})).json()
    assert json.loads(response.pop("logprobs")) == [{"9": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]
    assert response.pop("details")["finish_reason"] == "stop_sequence"
    assert response == {
        "id": "r",
        "model_name": "smollm2",
        "model_version": None,
        "text_output": "x",
        "finish_reason": "stop",
        "cumulative_logprob": -0.5,
        "num_input_tokens": 7,
        "num_output_tokens": 1,
    }


async def test_outputs_of_a_stream() -> None:
    flags = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    engine = FakeEngine(tokens("a", "b", reason=FinishReason.EOS))
    first, last = sse_events((await post(engine, {"text_input": "p", **flags}, f"{URL}_stream")).text)
    assert (first["finish_reason"], last["finish_reason"]) == ("None", "stop")
    assert (first["num_output_tokens"], last["num_output_tokens"]) == (1, 1)
    assert ("num_input_tokens" in first, last["num_input_tokens"]) == (False, 7)


async def test_sampling_parameters_win() -> None:
    engine = FakeEngine()
    text = '{"max_tokens": "5", "top_p": 0.5}'
    await post(engine, {"text_input": "p", "sampling_parameters": text, "max_tokens": 9, "top_p": 0.9})
    assert (engine.requests[0].max_new_tokens, engine.requests[0].sampling.top_p) == (5, 0.5)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_tokens": 0}, "Parameter max_tokens must be in [1, 2147483647], got 0"),
        ({"max_tokens": [1, 2]}, "max_tokens must be integer type, got an array of 2"),
        ({"max_tokens": 5, "parameters": {"max_tokens": 6}}, "must have one value"),
        ({"stream": "maybe"}, 'stream must be boolean type, got "maybe"'),
        ({"return_logprobs": 1}, "return_logprobs must be boolean type, got 1"),
        ({"max_tokens": 5, "temperature": -1}, "Parameter temperature must be in (0, "),
        ({"beam_width": 4}, "Parameter beam_width must be 1, because nothing else is served, got 4"),
        ({"bad_words": ["x"]}, "bad_words must be empty, because it is not served"),
        ({"n": 2}, "Parameter n must be 1"),
        ({"max_tokens": 1, "text_input": ["a", "b"]}, "multimodal input is not served yet"),
        ({"max_tokens": 1, "text_input": None}, "Parameter text_input must not be null."),
        ({"logprobs": 21}, "Parameter logprobs must be in [0, 20], got 21"),
        ({"sampling_parameters": "{"}, "sampling_parameters must be a JSON object"),
    ],
)
async def test_fields_that_break_their_rule(fields: dict[str, Any], complaint: str) -> None:
    response = await post(FakeEngine(), {"text_input": "p", **fields})
    assert (response.status_code, response.json()["error_type"]) == (422, "Input Validation Error")
    assert complaint in response.json()["error"]


async def test_mindies_rules_hold_where_nothing_is_tritons() -> None:
    response = await post(FakeEngine(), {"text_input": "p", "parameters": {"temperature": 0}})
    assert response.status_code == 422
    response = await post(FakeEngine(), {"text_input": "p", "parameters": {"max_new_tokens": "5"}})
    assert response.status_code == 422
