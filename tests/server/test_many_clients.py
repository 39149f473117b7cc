"""Many clients at once against the real process: leaving, reading slowly, sending nonsense.

The cases are those that users of other servers reported (their numbers stand beside the tests).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model

RUNNING = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """Few sequences run at once and answers may be long, so that requests can be caught in every state."""
    repository = tmp_path_factory.mktemp("repository")
    parameters = {"maxBatchSize": str(RUNNING), "maxBatchedTokens": "16", "maxIterTimes": "900", "maxSeqLen": "1000"}
    build_tiny_model(add_model(repository, "tiny", parameters=parameters))
    with ServerProcess("--model-repository", str(repository)) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as one:
        yield one


def body(text: str = "Once", *, stream: bool = False, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "stream": stream, "parameters": {"ignore_eos": True, "details": True, **parameters}}


async def answer(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/infer", json=request)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """The engine's gauges and counters by name."""
    found = {}
    for line in (await client.get("/metrics")).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("tengserve_") and name.endswith('{model="tiny",version="1"}'):
            found[name.removeprefix("tengserve_").partition("{")[0]] = float(value)
    return found


async def until(client: httpx.AsyncClient, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Ask for the metrics until the condition holds; the server answers between its steps, so this does not spin."""
    async with asyncio.timeout(60):
        while not condition(now := await metrics(client)):
            pass
    return now


def idle(now: dict[str, float]) -> bool:
    return now["running_requests"] == now["waiting_requests"] == 0


async def assert_unharmed(client: httpx.AsyncClient) -> None:
    """Every block is back, and the server answers."""
    now = await until(client, idle)
    assert now["kv_cache_free_blocks"] + now["kv_cache_idle_blocks"] == now["kv_cache_blocks"]
    assert (await answer(client, body(max_new_tokens=2)))["details"]["generated_tokens"] == 2


async def test_half_of_the_streams_leave_after_a_token(client: httpx.AsyncClient) -> None:
    """C7."""

    async def stream(number: int) -> int:
        request = body(f"Story {number}", stream=True, max_new_tokens=30 if number % 2 else 800)
        events = 0
        async with client.stream("POST", "/infer", json=request) as response:
            async for line in response.aiter_lines():
                if line:
                    events += 1
                    if number % 2 == 0:
                        break
        return events

    events = await asyncio.gather(*(stream(number) for number in range(20)))
    assert events == [1, 30] * 10
    await assert_unharmed(client)


@pytest.mark.parametrize("stream", [False, True], ids=["text", "stream"])
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_a_client_that_leaves_ends_its_request_in_every_state(
    client: httpx.AsyncClient, state: str, stream: bool
) -> None:
    """C8."""
    before = await until(client, idle)
    keepers: list[asyncio.Task[dict[str, Any]]] = []
    if state == "queued":
        keepers = [asyncio.create_task(answer(client, body(f"{n}", max_new_tokens=150))) for n in range(RUNNING)]
        await until(client, lambda now: now["running_requests"] == RUNNING)
    text = "Once upon a time " * 40 if state == "prefilling" else "Once"
    leaving = asyncio.create_task(client.post("/infer", json=body(text, stream=stream, max_new_tokens=890)))
    if state == "queued":
        await until(client, lambda now: now["waiting_requests"] == 1)
    elif state == "prefilling":
        await until(client, lambda now: now["prompt_tokens_total"] > before["prompt_tokens_total"])
    else:
        await until(client, lambda now: now["generated_tokens_total"] > before["generated_tokens_total"] + 2)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    for keeper in keepers:
        assert (await keeper)["details"]["generated_tokens"] == 150
    after = await until(client, idle)
    assert after["aborted_requests_total"] == before["aborted_requests_total"] + 1
    assert after["generated_tokens_total"] - before["generated_tokens_total"] < 150 * len(keepers) + 600
    await assert_unharmed(client)


async def test_streams_read_at_different_speeds_each_equal_their_own_text(client: httpx.AsyncClient) -> None:
    """C11, C35, C39."""
    requests = [body(f"Story {number}", max_new_tokens=20 + number) for number in range(16)]
    alone = [await answer(client, request) for request in requests]

    ended = asyncio.Event()

    async def read(number: int) -> tuple[str, dict[str, Any]]:
        lines = []
        async with client.stream("POST", "/infer", json={**requests[number], "stream": True}) as response:
            if number % 4 == 0:
                await ended.wait()  # The slow ones begin to read when the others have ended.
            lines = [json.loads(line.removeprefix("data: ")) async for line in response.aiter_lines() if line]
        assert len(lines) == 20 + number
        return lines[-1]["generated_text"], lines[-1]["details"]

    tasks = [asyncio.create_task(read(number)) for number in range(16)]
    await asyncio.gather(*(task for number, task in enumerate(tasks) if number % 4))
    ended.set()
    for number, expected in enumerate(alone):
        text, details = await tasks[number]
        assert text == expected["generated_text"]
        assert details["generated_tokens"] == expected["details"]["generated_tokens"] == 20 + number
        assert details["finish_reason"] == "length"


async def test_nonsense_costs_nobody_anything(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """C12, C18, C22, C40."""
    keeper = asyncio.create_task(answer(client, body("Keep", max_new_tokens=200)))
    nonsense: list[tuple[str, bytes]] = [
        ("/infer", b""),
        ("/infer", b"{"),
        ("/infer", b'{"inputs": ""}'),
        ("/infer", b'{"inputs": "a", "parameters": {"top_k": 0.01}}'),
        ("/infer", b'{"inputs": "a", "parameters": {"temperature": 1e400}}'),
        ("/infer", b'{"inputs": "a", "parameters": {"max_new_tokens": 0}}'),
        ("/infer_token", b'{"input_id": []}'),
        *(
            ("/infer_token", b'{"input_id": [' + token + b"]}")
            for token in (b"-1", b"320", b"9223372036854775808", b"1.5", b'"3"', b"true", b"null")
        ),
        ("/v2/models/tiny/generate", b'{"text_input": null}'),
        ("/v2/models/none/generate", b'{"text_input": "a"}'),
        ("/v2/models/tiny/versions/9/generate", b'{"text_input": "a"}'),
    ]
    for path, content in nonsense:
        response = await client.post(path, content=content)
        assert 400 <= response.status_code < 500, (path, content, response.text)
        assert set(response.json()) == {"error", "error_type"}
        assert "/" not in response.json()["error"].replace(path, "")
        assert "Traceback" not in response.text
    minimal = {
        "/infer": {"inputs": "a"},
        "/infer_token": {"input_id": [5]},
        "/v2/models/tiny/generate": {"text_input": "a"},
    }
    for path, fields in minimal.items():
        assert (await client.post(path, json=fields)).status_code == 200
    assert (await client.post("/infer", json=body("a", temprature=0.1, max_new_tokens=1))).status_code == 200
    assert (await keeper)["details"]["generated_tokens"] == 200
    await assert_unharmed(client)
