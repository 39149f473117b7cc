"""Triton's generate extension for models of tensors."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest

from support.asgi import RawConnection, app_with, client_of, served, sse_events
from support.fake_engine import FakeEngine
from support.identity import IdentityModel, texts
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.protocols.triton_generate import NOT_ONE_RESPONSE
from tengserve_backend.errors import ErrorCode, InvalidRequestError, ModelExecutionError
from tengserve_backend.inference import Datatype, InferTensor, TensorSpec

URL = "/v2/models/identity/generate"
INPUTS = (
    TensorSpec("PROMPT", Datatype.BYTES, (-1, 1)),
    TensorSpec("STREAM", Datatype.BOOL, (1,), optional=True),
    TensorSpec("COUNT", Datatype.INT8, (-1, 2, -1), optional=True),
    TensorSpec("SHARE", Datatype.FP32, (2,), optional=True),
    TensorSpec("SIZE", Datatype.UINT16, (-1,), optional=True),
)
OUTPUTS = tuple(TensorSpec(spec.name, spec.datatype, spec.shape) for spec in INPUTS)


def model(**fields: Any) -> IdentityModel:
    return IdentityModel(inputs=INPUTS, outputs=OUTPUTS, **fields)


async def post(served_model: IdentityModel, content: Any, *, stream: bool = False, **options: Any) -> httpx.Response:
    settings = options.pop("settings", None)
    sent = {"content": content if isinstance(content, bytes | str) else json.dumps(content)}
    async with client_of(app_with(FakeEngine(), tensor_models=[served_model], settings=settings)) as client:
        return await client.post(f"{URL}_stream" if stream else URL, **sent, **options)


async def test_keys_are_tensors_or_parameters_by_the_metadata() -> None:
    identity = model()
    body = {"id": "r", "PROMPT": ["hi"], "temperature": 0.5, "parameters": {"STREAM": True, "n": 3, "deep": "x"}}
    response = await post(identity, body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "id": "r",
        "model_name": "identity",
        "model_version": "1",
        "PROMPT": "hi",
        "STREAM": True,
    }
    request = identity.requests[0]
    assert request.request_id == "r"
    assert request.parameters == {"temperature": 0.5, "n": 3, "deep": "x"}
    assert [tensor.shape for tensor in request.inputs] == [(1, 1), (1,)]


@pytest.mark.parametrize(
    ("name", "value", "shape"),
    [
        ("PROMPT", "a", (1, 1)),
        ("PROMPT", ["a", "b"], (2, 1)),
        ("PROMPT", [], (0, 1)),
        ("COUNT", [1, 2, 3, 4], (1, 2, 2)),
        ("COUNT", [], (1, 2, 0)),
        ("SHARE", [1, 2.5], (2,)),
        ("SIZE", 65535, (1,)),
    ],
)
async def test_the_shape_is_deduced_of_the_metadata(name: str, value: Any, shape: tuple[int, ...]) -> None:
    identity = model()
    assert (await post(identity, {name: value})).status_code == 200
    assert identity.requests[0].inputs[0].shape == shape


async def test_the_shape_of_outputs_is_lost() -> None:
    outputs = (
        InferTensor("A", Datatype.FP32, np.array([[0.5]], np.float32)),
        InferTensor("B", Datatype.INT32, np.array([[1, 2], [3, 4]], np.int32)),
        InferTensor("C", Datatype.FP64, np.zeros(0)),
        texts("D", "x", "y"),
    )
    response = await post(model(scripted=[outputs], parameters={"cost": 1}), {"PROMPT": "a"})
    found = response.json()
    assert (found["A"], found["B"], found["C"], found["D"], found["cost"]) == (0.5, [1, 2, 3, 4], [], ["x", "y"], 1)
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("", "failed to parse the request JSON buffer"),
        ("[]", "failed to parse the request JSON buffer"),
        ('{"PROMPT": 1}', "Unable to parse 'PROMPT': attempt to access JSON non-string as string"),
        ('{"PROMPT": null}', "attempt to access JSON non-string as string"),
        ('{"PROMPT": {}}', "attempt to access JSON non-string as string"),
        ('{"PROMPT": [["a"]]}', "attempt to access JSON non-string as string"),
        ('{"STREAM": "yes"}', "attempt to access JSON non-boolean as boolean"),
        ('{"SHARE": ["a", 1]}', "attempt to access JSON non-number as double"),
        ('{"COUNT": [1.5, 2]}', "attempt to access JSON non-signed-integer as signed-integer"),
        ('{"COUNT": [128, 2]}', "must be INT8, so in [-128, 127], got 128"),
        ('{"COUNT": [1, 2, 3]}', "The schema can not convert input 'COUNT' to tensor with proper shape"),
        ('{"SHARE": [1]}', "The schema can not convert input 'SHARE' to tensor with proper shape"),
        ('{"PROMPT": "a", "PROMPT": "b"}', "input 'PROMPT' already exists in request"),
        ('{"PROMPT": "a", "parameters": {"PROMPT": "b"}}', "Converting keyword: 'parameters': input 'PROMPT' already"),
        ('{"parameters": 1}', "Expected JSON object for keyword: 'parameters'"),
        ('{"parameters": {"x": {}}}', "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be"),
        ('{"x": [1]}', "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        (r'{"x": "\ud800"}', "failed to parse the request JSON buffer: a lone surrogate at byte 7 is no text"),
        (r'{"PROMPT": ["a", "\udfffb"]}', "failed to parse the request JSON buffer: a lone surrogate at byte 18"),
        (r'{"PROMPT": "a", "\ud800\ud800": 1}', "failed to parse the request JSON buffer: a lone surrogate at byte 17"),
        ('{"x": null}', "parameter 'x' has invalid type"),
        ('{"id": 1}', "Unable to parse 'id': attempt to access JSON non-string as string"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_breaks_the_mapping(body: str, complaint: str, stream: bool) -> None:
    identity = model()
    response = await post(identity, body, stream=stream)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert set(response.json()) == {"error"}
    assert complaint in response.json()["error"]
    assert not identity.requests


async def test_an_input_called_parameters_leaves_nothing_to_nest() -> None:
    taken = IdentityModel(inputs=(TensorSpec("parameters", Datatype.BYTES, (1,)),))
    response = await post(taken, {"parameters": "a"})
    assert response.status_code == 400
    assert "for nested schema also given as input tensor name" in response.json()["error"]


async def test_bodies_have_a_limit_and_no_encoding() -> None:
    large = await post(model(), {"PROMPT": "a" * 2000}, settings=HttpSettings(max_tensor_bytes=1500))
    assert large.status_code == 400
    assert " bytes exceeds the maximum allowed input size of " in large.json()["error"]
    encoded = await post(model(), gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert (encoded.status_code, encoded.json()) == (
        400,
        {"error": "Unsupported content-encoding, only 'identity' is supported."},
    )


async def test_a_stream_is_one_event_a_response() -> None:
    scripted = [(texts("OUT", "a"),), (texts("OUT", "b", "c"),), ()]
    response = await post(model(decoupled=True, scripted=scripted), {"PROMPT": "p"}, stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [event["OUT"] for event in sse_events(response.text)] == ["a", ["b", "c"]]


async def test_one_response_streams_as_one_event() -> None:
    response = await post(model(), {"PROMPT": "p"}, stream=True)
    assert [event["PROMPT"] for event in sse_events(response.text)] == ["p"]


async def test_no_response_at_all() -> None:
    response = await post(model(decoupled=True, scripted=[()]), {"PROMPT": "p"}, stream=True)
    assert (response.status_code, response.text) == (200, "")
    response = await post(model(decoupled=True, scripted=[()]), {"PROMPT": "p"})
    assert (response.status_code, response.json()) == (500, {"error": NOT_ONE_RESPONSE})


async def test_generate_takes_one_response_and_a_bare_end() -> None:
    one = [(texts("OUT", "a"),), ()]
    assert (await post(model(decoupled=True, scripted=one), {"PROMPT": "p"})).json()["OUT"] == "a"
    two = [(texts("OUT", "a"),), (texts("OUT", "b"),)]
    response = await post(model(decoupled=True, scripted=two), {"PROMPT": "p"})
    assert (response.status_code, response.json()) == (500, {"error": NOT_ONE_RESPONSE})


async def test_errors_of_a_stream() -> None:
    """Before the model runs: plain. The model's first answer: its status, as an event. Later: an event."""
    plain = await post(model(scripted=[], error=InvalidRequestError("missing")), {"PROMPT": "p"}, stream=True)
    assert (plain.status_code, plain.json()) == (400, {"error": "missing"})
    failure = ModelExecutionError("broken", code=ErrorCode.UNAVAILABLE)
    first = await post(model(scripted=[], error=failure), {"PROMPT": "p"}, stream=True)
    assert (first.status_code, first.text) == (503, 'data: {"error":"broken"}\n\n')
    assert first.headers["content-type"] == "text/event-stream; charset=utf-8"
    later = await post(model(scripted=[(texts("OUT", "a"),)], error=failure), {"PROMPT": "p"}, stream=True)
    assert later.status_code == 200
    assert sse_events(later.text)[1] == {"error": "broken"}


async def test_outputs_that_json_cannot_say() -> None:
    half = InferTensor("OUT", Datatype.FP16, np.zeros(1, np.float16))
    response = await post(model(scripted=[(half,)]), {"PROMPT": "p"})
    assert response.status_code == 400
    assert "sending FP16 data via JSON is not supported" in response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    """Triton notices at its next write; here the model hears of it at once."""
    waiting = model(gate=asyncio.Event())
    async with served(app_with(tensor_models=[waiting])) as port, RawConnection.to(port) as connection:
        await connection.post(f"{URL}_stream" if stream else URL, {"PROMPT": "p"})
        await asyncio.wait_for(waiting.began.wait(), 10)
        await connection.close()
        await asyncio.wait_for(waiting.closed.wait(), 10)


async def test_an_llm_and_what_is_not_there_are_the_llms() -> None:
    async with client_of(app_with(FakeEngine(), tensor_models=[model()])) as client:
        answer = await client.post("/v2/models/smollm2/generate", json={"text_input": "a"})
        assert answer.json()["text_output"] == "Hello world"
        unknown = await client.post("/v2/models/nobody/generate", json={"text_input": "a"})
        assert unknown.status_code == 404
        version = await client.post("/v2/models/identity/versions/1/generate", json={"PROMPT": "a"})
        assert version.json()["PROMPT"] == "a"
