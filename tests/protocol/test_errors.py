"""Every error: its status, its body, its headers, on text and stream alike as long as nothing was sent."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI, HTTPException

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine, FakeModels
from support.tensor_models import PlainControl
from tengserve_adapter.http.app import install
from tengserve_adapter.http.errors import REPLIES
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend import errors

CASES: list[tuple[BaseException, int, str, str]] = [
    (errors.InvalidRequestError("no tokens"), 422, "Input Validation Error", "no tokens"),
    (errors.PromptTooLongError("too long: 9 > 8"), 424, "Generation Error", "too long: 9 > 8"),
    (errors.InvalidTokenIdError("input_id[3]"), 424, "Generation Error", "input_id[3]"),
    (errors.OverloadedError("queue full", retry_after_s=7), 429, "Too Many Requests", "queue full"),
    (errors.ShuttingDownError("stopping"), 503, "Service Unavailable", "stopping"),
    (errors.RequestAbortedError("cancelled"), 503, "Service Unavailable", "cancelled"),
    (
        errors.DeadlineExceededError("10 s passed"),
        500,
        "Incomplete Generation",
        "Engine callback timeout: client timeout",
    ),
    (errors.GenerationFailedError("NaN"), 500, "Incomplete Generation", "NaN"),
    (errors.EngineFailedError("dead"), 500, "Incomplete Generation", "dead"),
    (ValueError("/secret/path"), 500, "Internal Server Error", "Internal server error."),
    (errors.ConfigurationError("x", file="/secret/path"), 500, "Internal Server Error", "Internal server error."),
]
REQUESTS = [
    ("/infer", {"inputs": "a"}),
    ("/infer", {"inputs": "a", "stream": True}),
    ("/infer_token", {"input_id": [1], "stream": True}),
    ("/v2/models/smollm2/generate", {"text_input": "a"}),
    ("/v2/models/smollm2/generate_stream", {"text_input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case[0]).__name__)
@pytest.mark.parametrize("when", ["submit", "first event"])
async def test_before_the_first_event(
    path: str, body: dict[str, object], case: tuple[BaseException, int, str, str], when: str
) -> None:
    error, status, error_type, message = case
    engine = FakeEngine(submit_error=error) if when == "submit" else FakeEngine([error])
    async with client_of(app_with(engine)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.text == json.dumps({"error": message, "error_type": error_type}, separators=(",", ":"))
    if status == 429:
        assert response.headers["retry-after"] == "7"
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_every_error_of_a_request_or_the_server_has_its_reply() -> None:
    def leaves(cls: type[errors.TengserveError]) -> set[type[errors.TengserveError]]:
        children = cls.__subclasses__()
        found = {cls} if not children else {leaf for child in children for leaf in leaves(child)}
        # What only the start of the server raises is answered to nobody.
        return {leaf for leaf in found if leaf.__module__ == errors.__name__}

    assert leaves(errors.RequestError) | leaves(errors.ServerError) <= set(REPLIES)


async def test_an_engine_that_ends_without_an_end_has_failed() -> None:
    for path, body in REQUESTS:
        engine = FakeEngine()
        engine.script = []
        async with client_of(app_with(engine)) as client:
            response = await client.post(path, json=body)
        assert (response.status_code, response.json()["error_type"]) == (500, "Incomplete Generation")


async def test_draining_admits_nothing() -> None:
    engine = FakeEngine()
    async with client_of(app_with(engine, draining=True)) as client:
        for path, body in REQUESTS:
            response = await client.post(path, json=body)
            assert (response.status_code, response.json()["error_type"]) == (503, "Service Unavailable")
            assert "retry-after" in response.headers
    assert not engine.requests


async def test_error_bodies_are_small_and_valid_whatever_the_message() -> None:
    for message in ("x" * 100_000, "\x01" * 10_000, "好" * 10_000, "\ud800"):
        async with client_of(app_with(FakeEngine(submit_error=errors.GenerationFailedError(message)))) as client:
            response = await client.post("/infer", json={"inputs": "a"})
        assert response.status_code == 500
        assert len(response.content) < 4096
        assert isinstance(response.json()["error"], str)


async def test_unknown_routes_and_methods() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for path, said in (
            ("/nothing", "/nothing"),
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v2/models/smollm2/generate/more", "/v2/models/smollm2/generate/more"),
            ("/v2/" + "x" * 6000, "/v2/" + "x" * 57 + "..."),
            ("/two%0Alines?a=1", "/two\\nlines"),
        ):
            response = await client.post(path)
            assert (response.status_code, response.json()) == (
                404,
                {"error": f"This server has no URL {said}", "error_type": "NotFoundError"},
            )
        for method, path, allowed in (
            ("GET", "/infer", "POST"),
            ("PUT", "/infer_token", "POST"),
            ("DELETE", "/v2/models/smollm2/generate", "POST"),
            ("GET", "/v2/models/smollm2/versions/1/generate_stream", "POST"),
            ("POST", "/v2/health/ready", "GET, HEAD"),
        ):
            response = await client.request(method, path)
            assert response.status_code == 405
            assert sorted(response.headers["allow"].split(", ")) == allowed.split(", ")
            answer = response.json()
            assert answer == {
                "error": f"{path} takes {response.headers['allow']}, not {method}",
                "error_type": "Method Not Allowed",
            }


async def test_what_other_routes_of_the_app_raise_is_json_too() -> None:
    app = FastAPI()
    install(app, FakeModels({}), HttpSettings(), control=PlainControl(), draining=lambda: False)

    @app.get("/broken")
    async def broken(number: int) -> None:
        raise ValueError("/secret/path")

    @app.get("/wordy")
    async def wordy() -> None:
        raise HTTPException(409, "x" * 100_000, headers={"X-Kept": "yes"})

    async with client_of(app) as client:
        response = await client.get("/wordy")
        assert (response.status_code, response.headers["x-kept"]) == (409, "yes")
        assert response.json()["error_type"] == "Conflict"
        assert len(response.content) < 4096
        response = await client.get("/broken", params={"number": 1})
        assert (response.status_code, response.json()["error"]) == (500, "Internal server error.")
        response = await client.get("/broken", params={"number": "x" * 10_000})
        assert response.status_code == 422
        assert len(response.content) < 4096
        assert isinstance(response.json()["error"], str)
