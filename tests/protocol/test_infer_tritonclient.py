"""Triton's own HTTP clients against a real server, in every datatype and both forms of data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from support.asgi import app_with, served
from support.fake_engine import FakeEngine
from support.identity import IdentityModel, identity
from tengserve_backend.inference import Datatype

JSON_DATATYPES = [datatype for datatype in Datatype if datatype not in (Datatype.FP16, Datatype.BF16)]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    models = [identity(datatype, (-1, -1)) for datatype in Datatype]
    for model in models:
        model.name = f"identity_{model.inputs[0].datatype.value}"
    repeated = IdentityModel(name="decoupled", decoupled=True)
    async with served(app_with(FakeEngine(), tensor_models=[*models, repeated])) as found:
        yield found


def sample(datatype: Datatype) -> np.ndarray[Any, Any]:
    if datatype is Datatype.BYTES:
        return np.array([["", "zwölf"], ["a\0b", '"\\\n']], np.object_)
    if datatype is Datatype.BOOL:
        return np.array([[True, False], [False, True]])
    if datatype is Datatype.BF16:
        return np.array([[0.5, -1.0], [3.0, 1e30]], ml_dtypes.bfloat16)
    if datatype in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        return np.array([[0.1, -1.5], [np.inf, 3.0]], datatype.dtype)
    limits = np.iinfo(datatype.dtype.name)
    return np.array([[limits.min, 0], [1, limits.max]], datatype.dtype)


def same(found: np.ndarray[Any, Any], sent: np.ndarray[Any, Any], datatype: Datatype) -> None:
    if datatype is Datatype.BYTES:
        sent = np.array([[item.encode() for item in row] for row in sent], np.object_)
        found = np.array([[i if isinstance(i, bytes) else i.encode() for i in row] for row in found], np.object_)
    assert found.shape == sent.shape
    np.testing.assert_array_equal(found.astype(sent.dtype), sent)


def ask(
    port: int, datatype: Datatype, *, binary_in: bool, binary_out: bool, **options: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    data = sample(datatype)
    tensor = triton.InferInput("IN", list(data.shape), datatype.value)
    tensor.set_data_from_numpy(data, binary_data=binary_in)
    outputs = [triton.InferRequestedOutput("OUT", binary_data=binary_out)]
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = client.infer(f"identity_{datatype.value}", [tensor], outputs=outputs, request_id="7", **options)
    assert result.get_response()["id"] == "7"
    return data, result.as_numpy("OUT")


@pytest.mark.parametrize("datatype", Datatype)
async def test_binary_data(port: int, datatype: Datatype) -> None:
    sent, found = await asyncio.to_thread(ask, port, datatype, binary_in=True, binary_out=True)
    same(found, sent, datatype)


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
@pytest.mark.parametrize(("binary_in", "binary_out"), [(False, False), (False, True), (True, False)])
async def test_json_data(port: int, datatype: Datatype, binary_in: bool, binary_out: bool) -> None:
    sent, found = await asyncio.to_thread(ask, port, datatype, binary_in=binary_in, binary_out=binary_out)
    same(found, sent, datatype)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compression(port: int, encoding: str) -> None:
    sent, found = await asyncio.to_thread(
        ask,
        port,
        Datatype.FP32,
        binary_in=True,
        binary_out=True,
        request_compression_algorithm=encoding,
        response_compression_algorithm=encoding,
        model_version="1",
    )
    same(found, sent, Datatype.FP32)


async def test_outputs_that_nobody_asked_for_come_as_binary_data(port: int) -> None:
    def infer() -> Any:
        tensor = triton.InferInput("IN", [2, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[1], [2]]))
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            asked = client.async_infer("identity_INT64", [tensor], parameters={"mine": "x"})
            return asked.get_result()

    result = await asyncio.to_thread(infer)
    assert "data" not in result.get_output("OUT")
    assert result.as_numpy("OUT").tolist() == [[1], [2]]


async def test_the_asynchronous_client_and_a_text_model(port: int) -> None:
    tensor = triton_aio.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["Say: "], np.object_))
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = await client.infer(
            "smollm2", [tensor], parameters={"max_tokens": 7}, response_compression_algorithm="gzip"
        )
    assert result.as_numpy("text_output").tolist() == [b"Say: Hello world"]


async def test_the_clients_see_the_error_texts(port: int) -> None:
    def infer(name: str) -> str:
        tensor = triton.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([1], np.int32))
        outputs = [triton.InferRequestedOutput("NONE")]
        with (
            triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
            pytest.raises(InferenceServerException) as refused,
        ):
            client.infer(name, [tensor], outputs=outputs)
        return f"{refused.value.status()} {refused.value.message()}"

    assert await asyncio.to_thread(infer, "nobody") == "404 Request for unknown model: 'nobody' is not found"
    found = await asyncio.to_thread(infer, "decoupled")
    assert found == "400 unexpected inference output 'NONE' for model 'decoupled'"
