"""MindIE's token infer, on the URL of v2 infer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from support.identity import identity
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend.errors import PromptTooLongError
from tengserve_backend.inference import Datatype

URL = "/v2/models/smollm2/infer"


def body(**tensor: Any) -> dict[str, Any]:
    item = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [396, 319, 13996], **tensor}
    return {"id": "a123", "inputs": [item], "outputs": [{"name": "output0"}]}


async def post(engine: FakeEngine, content: dict[str, Any], **settings: Any) -> httpx.Response:
    async with client_of(app_with(engine, settings=HttpSettings(**settings))) as client:
        return await client.post(URL, json=content)


@pytest.mark.parametrize("strict", [False, True])
async def test_token_ids_in_and_out(strict: bool) -> None:
    engine = FakeEngine()
    parameters = {"temperature": 0.5, "top_k": 10, "max_new_tokens": 9, "details": True, "batch_size": 4, "seed": 3}
    response = await post(engine, body(parameters=parameters), strict_decoupled=strict)
    assert response.status_code == 200
    assert response.json() == {
        "id": "a123",
        "outputs": [{"name": "output0", "shape": [1, 2], "datatype": "UINT32", "data": [100, 101]}],
    }
    request = engine.requests[0]
    assert (request.request_id, request.prompt, request.max_new_tokens) == ("a123", (396, 319, 13996), 9)
    assert (request.sampling.do_sample, request.sampling.temperature, request.sampling.seed) == (True, 0.5, 3)
    assert request.max_prompt_tokens == 2560 - 512


async def test_a_flat_shape_and_no_id() -> None:
    response = await post(FakeEngine(), {**body(shape=[3]), "id": None})
    assert response.status_code == 200
    assert len(response.json()["id"]) == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({**body(), "outputs": None}, "outputs must be an array of one object, got null"),
        ({"inputs": body()["inputs"]}, "outputs must be an array of one object, got null"),
        ({**body(), "outputs": [{"name": ""}]}, "outputs[0].name must be a string of 1 to 256 characters"),
        ({**body(), "inputs": body()["inputs"] * 2}, "inputs must be an array of one object, got an array of 2"),
        (body(name=None), "inputs[0].name must be a string of 1 to 256 characters, got null"),
        (body(name="n" * 257), "inputs[0].name must be a string of 1 to 256 characters"),
        (body(shape=[1, 1, 3]), "inputs[0].shape must be [n] or [1, n] with n in (0, 1048576], got [1, 1, 3]"),
        (body(shape=[2, 3]), "inputs[0].shape must be"),
        (body(shape=[0]), "inputs[0].shape must be"),
        (body(shape=[True]), "inputs[0].shape must be"),
        (body(shape=[4]), "inputs[0].data must have 4 elements, as its shape says, got 3"),
        (body(data="ids"), 'inputs[0].data must be an array of integers, got "ids"'),
        (body(data=[1, 2, 1048577]), "inputs[0].data[2] must be an integer in [0, 1048576], got 1048577"),
        (body(data=[1, 2.0, 3]), "inputs[0].data[1] must be an integer in [0, 1048576], got 2.0"),
        (body(parameters={"temperature": 0}), "Parameter temperature must be in (0, 3.4028234663852886e38], got 0"),
        ({**body(), "id": 7}, "id must be string type, got 7"),
    ],
)
async def test_a_field_that_breaks_its_rule_is_answered_as_mindie_does(content: dict[str, Any], complaint: str) -> None:
    engine = FakeEngine()
    response = await post(engine, content)
    assert (response.status_code, response.json()["error_type"]) == (422, "Input Validation Error")
    assert complaint in response.json()["error"]
    assert not engine.requests


async def test_an_error_of_the_engine_is_answered_as_mindie_does() -> None:
    response = await post(FakeEngine(submit_error=PromptTooLongError("too long")), body())
    assert (response.status_code, response.json()) == (424, {"error": "too long", "error_type": "Generation Error"})


async def test_uint32_elsewhere_is_not_mindies() -> None:
    engine = FakeEngine()
    response = await post(engine, {"inputs": [{**body()["inputs"][0], "name": "input_ids"}]})
    assert [output["name"] for output in response.json()["outputs"]] == ["text_output", "output_ids"]
    model = identity(Datatype.UINT32)
    async with client_of(app_with(tensor_models=[model])) as client:
        tensor = {"name": "IN", "shape": [1], "datatype": "UINT32", "data": [5]}
        response = await client.post("/v2/models/identity/infer", json={"inputs": [tensor]})
        assert response.json()["model_name"] == "identity"
