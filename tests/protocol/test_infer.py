"""v2 infer over HTTP: JSON and binary data, compression, versions, parameters, classes, decoupled models, errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import zlib
from typing import Any

import httpx
import numpy as np
import pytest

from support.asgi import RawConnection, app_with, client_of, served
from support.fake_engine import FakeEngine, FakeState, FakeStatus
from support.identity import IdentityModel, identity, texts
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend.errors import ErrorCode, ModelExecutionError, OverloadedError
from tengserve_backend.inference import Datatype, InferTensor, SequenceFlags, TensorSpec

URL = "/v2/models/identity/infer"
HEAD = "Inference-Header-Content-Length"


def body(data: Any = (1, 2), **fields: Any) -> dict[str, Any]:
    tensor = {"name": "IN", "shape": [len(data)], "datatype": "INT32", "data": list(data)}
    return {"inputs": [tensor], **fields}


async def post(model: IdentityModel, content: Any, url: str = URL, **options: Any) -> httpx.Response:
    settings = options.pop("settings", None)
    sent = {"json": content} if isinstance(content, dict) else {"content": content}
    async with client_of(app_with(tensor_models=[model], settings=settings)) as client:
        return await client.post(url, **sent, **options)


async def test_json_both_ways() -> None:
    response = await post(IdentityModel(parameters={"cost": 2}), body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert HEAD not in response.headers
    assert response.json() == {
        "model_name": "identity",
        "model_version": "1",
        "parameters": {"cost": 2},
        "outputs": [{"name": "OUT", "shape": [2], "datatype": "INT32", "data": [1, 2]}],
    }


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "nonsense"])
async def test_the_content_type_does_not_matter(content_type: str) -> None:
    response = await post(IdentityModel(), json.dumps(body()).encode(), headers={"Content-Type": content_type})
    assert response.json()["outputs"][0]["data"] == [1, 2]


async def test_the_request_id_comes_back() -> None:
    assert (await post(IdentityModel(), body(id="mine"))).json()["id"] == "mine"


async def test_versions_in_the_path() -> None:
    model = IdentityModel()
    assert (await post(model, body(), "/v2/models/identity/versions/1/infer")).status_code == 200
    assert model.requests[0].version == "1"
    response = await post(model, body(), "/v2/models/identity/versions/9/infer")
    assert (response.status_code, response.json()) == (
        404,
        {"error": "Request for unknown model: 'identity' version 9 is not found"},
    )


async def test_nested_data() -> None:
    model = identity(Datatype.FP64, (2, 2))
    tensor = {"name": "IN", "shape": [2, 2], "datatype": "FP64", "data": [[1, 2.5], [3, 4]]}
    response = await post(model, {"inputs": [tensor]})
    assert response.json()["outputs"][0] == {
        "name": "OUT",
        "shape": [2, 2],
        "datatype": "FP64",
        "data": [1.0, 2.5, 3.0, 4.0],
    }


async def test_what_json_cannot_say_is_written_as_triton_does() -> None:
    tensor = {"name": "IN", "shape": [3], "datatype": "FP32", "data": [float("nan"), float("inf"), 0.5]}
    response = await post(identity(Datatype.FP32), json.dumps({"inputs": [tensor]}).encode())
    assert response.text.endswith('"data":[NaN,Infinity,0.5]}]}')


def binary_body(array: np.ndarray[Any, Any], datatype: str, **head: Any) -> tuple[bytes, dict[str, str]]:
    raw = array.tobytes()
    tensor = {"name": "IN", "shape": list(array.shape), "datatype": datatype}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}], **head}).encode()
    return text + raw, {HEAD: str(len(text))}


async def test_binary_both_ways() -> None:
    content, headers = binary_body(np.arange(3, dtype="<i4"), "INT32", parameters={"binary_data_output": True})
    response = await post(IdentityModel(), content, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[HEAD])
    head = json.loads(response.content[:length])
    assert head["outputs"] == [
        {"name": "OUT", "shape": [3], "datatype": "INT32", "parameters": {"binary_data_size": 12}}
    ]
    assert response.content[length:] == struct.pack("<3i", 0, 1, 2)


async def test_each_output_as_it_is_wanted() -> None:
    names = ("A", "B", "C")
    specs = tuple(TensorSpec(name, Datatype.INT32, (-1,)) for name in names)
    model = IdentityModel(inputs=specs, outputs=specs)
    inputs = [{"name": name, "shape": [1], "datatype": "INT32", "data": [i]} for i, name in enumerate(names)]
    outputs = [{"name": "C", "parameters": {"binary_data": True}}, {"name": "A"}]
    response = await post(model, {"inputs": inputs, "outputs": outputs})
    length = int(response.headers[HEAD])
    found = json.loads(response.content[:length])["outputs"]
    assert [output["name"] for output in found] == ["C", "A"]
    assert found[1]["data"] == [0]
    assert response.content[length:] == struct.pack("<i", 2)


async def test_a_raw_binary_request() -> None:
    model = identity(Datatype.FP32, (-1, 2, -1), max_batch_size=4)
    response = await post(model, np.arange(6, dtype="<f4").tobytes(), headers={HEAD: "0"})
    assert model.requests[0].inputs[0].shape == (1, 2, 3)
    length = int(response.headers[HEAD])
    assert response.content[length:] == np.arange(6, dtype="<f4").tobytes()


async def test_a_raw_binary_text() -> None:
    model = identity(Datatype.BYTES, (1,))
    response = await post(model, b"any \xff bytes", headers={HEAD: "0"})
    assert model.requests[0].inputs[0].data.tolist() == [b"any \xff bytes"]
    assert response.content.endswith(struct.pack("<I", 11) + b"any \xff bytes")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            IdentityModel(inputs=()),
            "Raw request must only have 1 input (found 1) to be deduced but got 0 inputs in 'identity' model",
        ),
        (identity(Datatype.FP32, (-1, -1)), "more than one variable-sized dimension"),
        (identity(Datatype.BYTES, (-1,)), "For BYTE datatype raw input 'IN', the model must have input shape [1]"),
        (identity(Datatype.BYTES, (2,)), "For BYTE datatype raw input 'IN', the model must have input shape [1]"),
        (identity(Datatype.FP32, (3,)), "must have 12 bytes for shape [3] of FP32, got 8"),
        (identity(Datatype.FP32, (3, -1)), "must have 0 bytes for shape [3, 0] of FP32, got 8"),
    ],
)
async def test_a_raw_request_that_nothing_can_be_deduced_of(model: IdentityModel, complaint: str) -> None:
    response = await post(model, b"12345678", headers={HEAD: "0"})
    assert response.status_code == 400
    assert complaint in response.json()["error"]


@pytest.mark.parametrize("length", ["-1", "1e1", "999", "", "99999999999999999999", "²"])
async def test_a_head_length_that_is_none(length: str) -> None:
    response = await post(IdentityModel(), json.dumps(body()).encode(), headers={HEAD: length.encode()})
    assert response.status_code == 400
    assert "Inference-Header-Content-Length must be an integer in [0, " in response.json()["error"]


@pytest.mark.parametrize(
    ("encoding", "encode", "decode"),
    [
        ("gzip", gzip.compress, gzip.decompress),
        ("deflate", zlib.compress, zlib.decompress),
    ],
)
async def test_compression_both_ways(encoding: str, encode: Any, decode: Any) -> None:
    """The head's length is that of the JSON before it is compressed."""
    content, headers = binary_body(np.zeros(100_000, "<i4"), "INT32", parameters={"binary_data_output": True})
    headers |= {"Content-Encoding": encoding, "Accept-Encoding": f"br, {encoding};q=0.5, identity;q=0.1"}
    async with client_of(app_with(tensor_models=[IdentityModel()])) as client:
        request = client.build_request("POST", URL, content=encode(content), headers=headers)
        response = await client.send(request, stream=True)
        raw = b"".join([chunk async for chunk in response.aiter_raw()])
    assert response.headers["content-encoding"] == encoding
    assert len(raw) < 10_000
    assert decode(raw)[int(response.headers[HEAD]) :] == bytes(400_000)


@pytest.mark.parametrize("accept", ["", "br", "gzip;q=0", "identity, gzip;q=0.5", "gzip;q=x", "*"])
async def test_no_compression_unless_it_is_liked_best(accept: str) -> None:
    response = await post(IdentityModel(), body(), headers={"Accept-Encoding": accept})
    assert "content-encoding" not in response.headers


async def test_an_unknown_encoding() -> None:
    response = await post(IdentityModel(), b"x", headers={"Content-Encoding": "br"})
    assert response.status_code == 501
    assert response.headers["accept-encoding"] == "gzip, deflate"
    assert 'Unsupported content-encoding "br"' in response.json()["error"]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"{}")[:-2], gzip.compress(b"{}") + b"more"])
async def test_damaged_compression(content: bytes) -> None:
    response = await post(IdentityModel(), content, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert "failed to decompress the body" in response.json()["error"]


async def test_limits_hold_before_and_after_decompression() -> None:
    settings = HttpSettings(max_tensor_bytes=2000)
    sent = await post(IdentityModel(), bytes(2001), settings=settings)
    bomb = gzip.compress(bytes(2001))
    inflated = await post(IdentityModel(), bomb, headers={"Content-Encoding": "gzip"}, settings=settings)
    for response in (sent, inflated):
        assert response.status_code == 400
        assert " bytes exceeds the maximum allowed input size of 2000 bytes" in response.json()["error"]
        assert set(response.json()) == {"error"}


async def test_bodies_have_a_limit_together_until_they_are_answered() -> None:
    """Two small bodies that become large: while the first is held, there is no room for the second."""
    model = identity(Datatype.BYTES, (1,))
    model.gate = asyncio.Event()
    limits = HttpSettings(max_tensor_bytes=1_000_000, max_held_body_bytes=1_500_000)
    headers = {HEAD: "0", "Content-Encoding": "gzip"}
    content = gzip.compress(bytes(1_000_000))
    async with client_of(app_with(tensor_models=[model], settings=limits)) as client:
        first = asyncio.create_task(client.post(URL, content=content, headers=headers))
        await asyncio.wait_for(model.began.wait(), 10)
        second = await client.post(URL, content=content, headers=headers)
        assert (second.status_code, second.json()) == (503, {"error": "Too many request bodies are held at once."})
        model.gate.set()
        assert (await first).status_code == 200
        assert (await client.post(URL, content=content, headers=headers)).status_code == 200


async def test_parameters_go_where_they_mean_something() -> None:
    model = IdentityModel()
    parameters = {"priority": 2, "timeout": 5, "sequence_id": 9, "sequence_end": True, "mine": 0.5, "text": "t"}
    tensor = {**body()["inputs"][0], "parameters": {"unit": "m"}}
    outputs = [{"name": "OUT", "parameters": {"shade": 1}}]
    await post(model, {"inputs": [tensor], "parameters": parameters, "outputs": outputs})
    request = model.requests[0]
    assert (request.priority, request.timeout_us, request.sequence) == (2, 5, SequenceFlags(9, end=True))
    assert request.parameters == {"mine": 0.5, "text": "t"}
    assert request.inputs[0].parameters == {"unit": "m"}
    assert request.outputs[0].parameters == {"shade": 1}


async def test_classes_in_place_of_an_output() -> None:
    model = identity(Datatype.FP32)
    model.outputs = (TensorSpec("OUT", Datatype.FP32, (-1,), labels=("cat", "dog")),)
    tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [0.25, 0.75]}
    outputs = [{"name": "OUT", "parameters": {"classification": 1}}]
    response = await post(model, {"inputs": [tensor], "outputs": outputs})
    assert response.json()["outputs"] == [
        {"name": "OUT", "shape": [1], "datatype": "BYTES", "data": ["0.750000:1:dog"]}
    ]


async def test_a_decoupled_model_answers_with_one_joined_response() -> None:
    model = IdentityModel(decoupled=True, scripted=[(texts("OUT", "a"),), (texts("OUT", "b"),), ()])
    assert (await post(model, body())).json()["outputs"][0]["data"] == ["ab"]


async def test_a_strict_server_refuses_decoupled_models() -> None:
    settings = HttpSettings(strict_decoupled=True)
    response = await post(IdentityModel(decoupled=True), body(), settings=settings)
    assert (response.status_code, response.json()) == (
        501,
        {"error": "HTTP end point doesn't support models with decoupled transaction policy"},
    )
    assert (await post(IdentityModel(), body(), settings=settings)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelExecutionError("no", code=ErrorCode.INTERNAL), 500),
        (ModelExecutionError("no", code=ErrorCode.NOT_FOUND), 404),
        (ModelExecutionError("no", code=ErrorCode.UNAVAILABLE), 503),
        (ModelExecutionError("no", code=ErrorCode.UNSUPPORTED), 501),
        (ModelExecutionError("no", code=ErrorCode.INVALID_ARG), 400),
        (ModelExecutionError("no", code=ErrorCode.CANCELLED), 400),
        (OverloadedError("no", retry_after_s=3), 503),
    ],
)
async def test_an_error_of_the_model(error: Exception, status: int) -> None:
    response = await post(IdentityModel(scripted=[], error=error), body())
    assert (response.status_code, response.json()) == (status, {"error": "no"})
    assert response.headers.get("retry-after") == ("3" if isinstance(error, OverloadedError) else None)


async def test_an_unexpected_failure_tells_no_details() -> None:
    response = await post(IdentityModel(scripted=[], error=RuntimeError("/secret/place")), body())
    assert (response.status_code, response.json()) == (500, {"error": "Internal server error."})


def changed(**fields: Any) -> dict[str, Any]:
    return {"inputs": [{**body()["inputs"][0], **fields}]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "failed to parse the request JSON buffer: Expecting value at line 1, column 1"),
        (b"[1", "failed to parse the request JSON buffer"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "failed to parse the request JSON buffer: nested too deep"),
        (b"[]", "must be an object, got an array of 0"),
        (rb'{"id": "\ud800"}', "failed to parse the request JSON buffer: a lone surrogate at byte 8 is no text"),
        (rb'{"id": "\ud83d\ude00 \\\udc00"}', "a lone surrogate at byte 23 is no text"),
        (rb'{"inputs": [{"name": "IN\uDABC", "shape": [NaN]}]}', "a lone surrogate at byte 24 is no text"),
        (rb'{"x": "\ud800", "inputs": "' + b"a" * 300_000 + b'"}', "a lone surrogate at byte 7 is no text"),
        ({}, "Unable to parse 'inputs': must be a list, got null"),
        ({"inputs": [1]}, "inputs[0] must be an object, got 1"),
        ({"inputs": [{}]}, "Unable to parse 'inputs[0].name'"),
        ({**body(), "id": 5}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({**body(), "parameters": []}, "parameters must be an object"),
        ({**body(), "parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved"),
        ({"inputs": body()["inputs"] * 2}, "input 'IN' already exists in request"),
        (changed(datatype="INT31"), "'datatype' of input 'IN' must be one of BOOL, UINT8"),
        (changed(datatype=[]), "'datatype' of input 'IN' must be one of"),
        (changed(shape=2), "'shape' of input 'IN' must be a list, got 2"),
        (
            changed(shape=[-2]),
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (changed(shape=[3]), "which does not match the 2 elements of its 'data'"),
        (changed(shape=[2**32, 2**32]), "causes total element count to exceed maximum size of 9223372036854775807"),
        # Multiplied out, so many large numbers would keep the interpreter's lock for hours.
        (changed(shape=[2**63 - 1] * 500_000), "causes total element count to exceed maximum size"),
        (changed(shape=[0] + [2**63 - 1] * 500_000), "must have at most 32 dimensions"),
        (changed(shape=[2**62]), "byte size overflow for input 'IN'"),
        (changed(shape=[2**50]), "at most 281474976710656 elements"),
        (changed(data=json.loads("[" * 101 + "1" + "]" * 101)), "JSON nesting depth exceeds maximum allowed limit"),
        (changed(data=[1, "2"]), 'must be integer, got "2"'),
        (changed(parameters={"binary_data_size": 8}), "must have either 'data' or 'binary_data_size', got both"),
        (changed(parameters={"shared_memory_region": "x"}), "shared memory, which this server does not serve"),
        ({**body(), "outputs": [{"name": "X"}]}, "unexpected inference output 'X' for model 'identity'"),
        ({**body(), "outputs": [{"name": "OUT"}] * 2}, "output 'OUT' already exists in request"),
        ({**body(), "outputs": [{"name": "OUT", "parameters": {"binary_data": 1}}]}, "must be boolean, got 1"),
        ({**body(), "outputs": [{"name": "OUT", "parameters": {"classification": -1}}]}, "unsigned integer, got -1"),
    ],
)
async def test_what_breaks_the_protocol(content: Any, complaint: str) -> None:
    model = IdentityModel()
    response = await post(model, content)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert complaint in response.json()["error"]
    assert not model.requests


@pytest.mark.parametrize(
    ("size", "tail", "complaint"),
    [
        (8, 7, "has 'binary_data_size' 8, but only 7 bytes follow"),
        (4, 8, "has 8 bytes of binary data behind its JSON, but its inputs take 4"),
        (-1, 0, "'binary_data_size' of input 'IN' must be an unsigned integer, got -1"),
        (7, 7, "must have 4 bytes for shape [1] of INT32, got 7"),
    ],
)
async def test_binary_data_that_does_not_fit(size: int, tail: int, complaint: str) -> None:
    tensor = {"name": "IN", "shape": [1], "datatype": "INT32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    response = await post(IdentityModel(), head + bytes(tail), headers={HEAD: str(len(head))})
    assert response.status_code == 400
    assert complaint in response.json()["error"]


async def test_more_json_values_than_a_server_should_hold() -> None:
    content = b'{"inputs": [{"name": "IN", "shape": [1], "datatype": "INT8", "data": [' + b"[]," * 600_000 + b"1]}]}"
    response = await post(IdentityModel(), content)
    assert response.status_code == 400
    assert "send tensors as binary data" in response.json()["error"]


async def test_models_that_are_not_there_or_not_ready() -> None:
    others = (FakeStatus("slow", "1", FakeState.LOADING),)
    async with client_of(app_with(FakeEngine(), others=others)) as client:
        unknown = await client.post("/v2/models/nobody/infer", content=b"not even json")
        assert (unknown.status_code, unknown.json()) == (
            404,
            {"error": "Request for unknown model: 'nobody' is not found"},
        )
        slow = await client.post("/v2/models/slow/infer", json=body())
        assert (slow.status_code, slow.json()) == (503, {"error": "Model slow is loading."})
    async with client_of(app_with(tensor_models=[IdentityModel()], draining=True)) as client:
        assert (await client.post(URL, json=body())).status_code == 503


async def test_a_client_that_leaves_ends_its_request() -> None:
    model = IdentityModel(gate=asyncio.Event())
    async with served(app_with(tensor_models=[model])) as port, RawConnection.to(port) as connection:
        await connection.post(URL, body())
        await asyncio.wait_for(model.began.wait(), 10)
        await connection.close()
        await asyncio.wait_for(model.closed.wait(), 10)


async def test_an_llm_by_its_tensor_names() -> None:
    engine = FakeEngine()
    tensors = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Say: "]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [7]},
    ]
    request = {"inputs": tensors, "parameters": {"temperature": 0.5}, "outputs": [{"name": "text_output"}]}
    async with client_of(app_with(engine)) as client:
        response = await client.post("/v2/models/smollm2/infer", json=request)
        assert response.json() == {
            "model_name": "smollm2",
            "model_version": "1",
            "outputs": [{"name": "text_output", "shape": [1], "datatype": "BYTES", "data": ["Say: Hello world"]}],
        }
        wrong = await client.post("/v2/models/smollm2/infer", json={**request, "parameters": {"temperature": -1}})
        assert (wrong.status_code, set(wrong.json())) == (400, {"error"})
    assert (engine.requests[0].max_new_tokens, engine.requests[0].sampling.temperature) == (7, 0.5)


async def test_a_vast_answer_of_numbers() -> None:
    tensor = InferTensor("OUT", Datatype.INT32, np.arange(200_000, dtype=np.int32))
    response = await post(IdentityModel(scripted=[(tensor,)]), body())
    assert response.json()["outputs"][0]["data"][-1] == 199_999
