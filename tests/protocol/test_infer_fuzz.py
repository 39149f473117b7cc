"""Requests with tensors that no client of good will sends: whatever they are, no 500, and always one sentence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from support.identity import IdentityModel
from support.infer_bodies import BODIES, JSON, LENGTHS, PARAMETERS
from tengserve_backend.inference import Datatype, TensorSpec


def send(path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    async def sent() -> httpx.Response:
        specs = (TensorSpec("IN", Datatype.INT32, (-1,)),)
        outputs = (TensorSpec("OUT", Datatype.INT32, (-1,)),)
        identity = IdentityModel(inputs=specs, outputs=outputs)
        async with client_of(app_with(FakeEngine(), tensor_models=[identity])) as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(sent())


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 422, 501), response.text
    if response.status_code != 200:
        assert len(response.content) < 4096
        error = json.loads(response.content)["error"]
        assert isinstance(error, str)
        assert "Traceback" not in error


@settings(max_examples=150, deadline=None)
@given(body=BODIES, tail=st.binary(max_size=20), length=LENGTHS, model=st.sampled_from(["identity", "smollm2"]))
def test_infer(body: Any, tail: bytes, length: str | None, model: str) -> None:
    text = json.dumps(body).encode()
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    check(send(f"/v2/models/{model}/infer", text + (tail if length is not None else b""), headers))
    right = {"Inference-Header-Content-Length": str(len(text))}
    check(send(f"/v2/models/{model}/infer", text + tail, right))


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60), encoding=st.sampled_from(["gzip", "deflate", "identity", "br", ""]))
def test_infer_of_anything(content: bytes, encoding: str) -> None:
    check(send("/v2/models/identity/infer", content, {"Content-Encoding": encoding}))


@settings(max_examples=120, deadline=None)
@given(
    body=st.dictionaries(
        st.sampled_from(["IN", "id", "parameters", "text_input", "max_tokens", "stream", "stop_words", "x"]),
        JSON | PARAMETERS,
        max_size=4,
    ),
    model=st.sampled_from(["identity", "smollm2"]),
    verb=st.sampled_from(["generate", "generate_stream"]),
)
def test_generate(body: Any, model: str, verb: str) -> None:
    check(send(f"/v2/models/{model}/{verb}", json.dumps(body).encode(), {}))


@settings(max_examples=80, deadline=None)
@given(
    instances=JSON | st.lists(st.text(max_size=3) | st.dictionaries(st.just("text_input"), JSON)),
    shared=PARAMETERS | JSON,
)
def test_predict(instances: Any, shared: Any) -> None:
    body = {"instances": instances, "parameters": shared}
    check(send("/v1/models/smollm2:predict", json.dumps(body).encode(), {}))
