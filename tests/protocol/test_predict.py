"""KServe's v1 :predict for an LLM."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.asgi import RawConnection, app_with, client_of, served
from support.fake_engine import FakeEngine, tokens
from tengserve_backend.errors import OverloadedError

URL = "/v1/models/smollm2:predict"


async def post(engine: FakeEngine, content: dict[str, Any], url: str = URL) -> httpx.Response:
    async with client_of(app_with(engine)) as client:
        return await client.post(url, json=content)


async def test_one_text_an_instance() -> None:
    engine = FakeEngine()
    response = await post(engine, {"instances": ["a", {"text_input": "b"}], "parameters": {"max_new_tokens": 5}})
    assert response.status_code == 200
    assert response.json() == {"predictions": ["Hello world", "Hello world"]}
    assert sorted(request.prompt for request in engine.requests) == ["a", "b"]
    assert {request.max_new_tokens for request in engine.requests} == {5}


async def test_an_instance_says_what_it_wants_for_itself() -> None:
    engine = FakeEngine()
    instances = [
        {"text_input": "a", "parameters": {"max_new_tokens": 6}},
        {"text_input": "b", "max_new_tokens": 7},
        {"text_input": "c: ", "max_tokens": 8, "exclude_input_in_output": False},
    ]
    response = await post(engine, {"instances": instances, "parameters": {"max_new_tokens": 5, "top_k": 3}})
    assert response.status_code == 422
    assert "instances[2]: Parameter max_new_tokens must have one value" in response.json()["error"]
    response = await post(engine, {"instances": instances[:2], "parameters": {"max_new_tokens": 5, "top_k": 3}})
    assert response.status_code == 200
    assert {request.prompt: request.max_new_tokens for request in engine.requests} == {"a": 6, "b": 7}
    assert {request.sampling.top_k for request in engine.requests} == {3}
    response = await post(engine, {"instances": instances[2:]})
    assert response.json() == {"predictions": ["c: Hello world"]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "instances must be an array of 1 to 256 elements, got null"),
        ({"instances": []}, "instances must be an array of 1 to 256 elements, got an array of 0"),
        ({"instances": ["a"] * 257}, "got an array of 257"),
        ({"instances": ["a", 5]}, "instances[1]: must be a string or an object, got 5"),
        ({"instances": ["a", ""]}, "instances[1]: Parameter text_input must have a number of characters"),
        ({"instances": ["a"], "parameters": 5}, "parameters must be an object, got 5"),
        ({"instances": ["a"], "parameters": {"top_p": 2}}, "instances[0]: Parameter top_p must be in (0, 1.0], got 2"),
        ({"instances": [{"text_input": "a", "parameters": 1}]}, "instances[0]: parameters must be an object, got 1"),
    ],
)
async def test_refused(content: dict[str, Any], complaint: str) -> None:
    engine = FakeEngine()
    response = await post(engine, content)
    assert response.status_code == 422
    assert complaint in response.json()["error"]
    assert not engine.requests


async def test_errors_are_the_whole_requests() -> None:
    full = FakeEngine(submit_error=OverloadedError("full", retry_after_s=2))
    response = await post(full, {"instances": ["a", "b"]})
    assert (response.status_code, response.json()["error"], response.headers["retry-after"]) == (429, "full", "2")
    assert (await post(FakeEngine(), {"instances": ["a"]}, "/v1/models/nobody:predict")).status_code == 404


async def test_a_client_that_leaves_ends_every_instance() -> None:
    engine = FakeEngine([*tokens("a", "b")[:1], asyncio.Event()])
    async with served(app_with(engine)) as port, RawConnection.to(port) as connection:
        await connection.post(URL, {"instances": ["a", "b"]})
        generations = [await asyncio.wait_for(engine.submissions.get(), 10) for _ in range(2)]
        await asyncio.wait_for(generations[0].reading.wait(), 10)
        await connection.close()
        for generation in generations:
            await asyncio.wait_for(generation.aborted.wait(), 10)
