"""Streams on a real socket: framing, headers, and what happens when they fail midway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from support.asgi import RawConnection, app_with, client_of, served, sse_events
from support.fake_engine import FakeEngine, tokens
from tengserve_adapter.http.answer import answer
from tengserve_adapter.http.connection import BoundedHttpProtocol
from tengserve_adapter.protocols.mindie import Url, parse
from tengserve_backend import errors
from tengserve_backend.engine.handle import GenerationHandle
from tengserve_backend.generation import FinishReason, GenerationRequest

STREAMS = [
    ("/infer", {"inputs": "a", "stream": True}),
    ("/infer_token", {"input_id": [1], "stream": True}),
    ("/v2/models/smollm2/generate_stream", {"text_input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_each_event_is_sent_as_soon_as_it_is_there(path: str, body: dict[str, object]) -> None:
    gate = asyncio.Event()
    first, second, last = tokens("a", "é\n", "c")
    async with served(app_with(FakeEngine([first, gate, second, last]))) as port, RawConnection.to(port) as connection:
        async with asyncio.timeout(20):
            await connection.post(path, body)
            head = await connection.head()
            chunk = await connection.chunk()
            # The engine is held at the gate, so this event did not wait for the next one.
            assert not gate.is_set()
            gate.set()
            chunks = [chunk, await connection.chunk(), await connection.chunk()]
            assert await connection.chunk() == b""
    status, *lines = head.lower().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "http/1.1 200 ok"
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    for chunk in chunks:
        assert chunk.startswith(b"data: {")
        assert chunk.endswith(b"}\n\n")
        assert chunk.count(b"\n") == 2
        json.loads(chunk.removeprefix(b"data: "))


@pytest.mark.parametrize("texts", [("Hello",), ("Hel", "", "lo", "", " ✓ wörld", ""), ("", "")])
@pytest.mark.parametrize("reason", list(FinishReason))
async def test_a_stream_says_what_the_text_answer_says(texts: tuple[str, ...], reason: FinishReason) -> None:
    app = app_with(FakeEngine(tokens(*texts, reason=reason)))
    async with client_of(app) as client:
        native = {"inputs": "a", "parameters": {"details": True}}
        text = (await client.post("/infer", json=native)).json()
        events = sse_events((await client.post("/infer", json={**native, "stream": True})).text)
        assert {key: events[-1][key] for key in text} == text
        assert len(events) == len(texts)
        assert [list(event) for event in events[:-1]] == [["prefill_time", "decode_time", "token"]] * (len(texts) - 1)
        assert [event["prefill_time"] is None for event in events] == [False] + [True] * (len(texts) - 1)
        assert [event["decode_time"] is None for event in events] == [True] + [False] * (len(texts) - 1)

        v2 = {"text_input": "a", "id": "x", "parameters": {"details": True}}
        text = (await client.post("/v2/models/smollm2/generate", json=v2)).json()
        events = sse_events((await client.post("/v2/models/smollm2/generate_stream", json=v2)).text)
        assert "".join(str(event["text_output"]) for event in events) == text["text_output"] == "".join(texts)
        assert events[-1]["details"] == text["details"]


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            errors.DeadlineExceededError("1 s"),
            {"error": "Engine callback timeout: client timeout", "error_type": "Incomplete Generation"},
        ),
        (errors.EngineFailedError("dead"), {"error": "dead", "error_type": "Incomplete Generation"}),
        (ValueError("/secret"), {"error": "Internal server error.", "error_type": "Internal Server Error"}),
    ],
)
async def test_a_failure_after_the_first_event_is_told_in_the_stream(
    path: str, body: dict[str, object], error: BaseException, expected: dict[str, str]
) -> None:
    engine = FakeEngine([tokens("a", "b")[0], error])
    async with served(app_with(engine)) as port, httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"http://127.0.0.1:{port}{path}", json=body)
    assert response.status_code == 200
    events = sse_events(response.text)
    assert len(events) == 2
    assert events[1] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_dead_engine_hangs_nobody(stream: bool, started: bool) -> None:
    """The engine never ends the request, although its time is over: the edge does."""
    never = asyncio.Event()
    engine = FakeEngine([tokens("a", "b")[0], never] if started else [never])
    call = parse(
        Url.INFER,
        {"inputs": "a", "stream": stream, "parameters": {"timeout": 1}},
        engine.info,
        max_text_chars=10,
        request_id="x",
    )
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    task = answer(engine, call, send, grace_s=-0.99)
    if stream and started:
        await task
        assert b'"error":"Engine callback timeout: client timeout"' in sent[-2]["body"]
        assert sent[-1]["more_body"] is False
    else:
        with pytest.raises(errors.DeadlineExceededError):
            await task
        assert not sent
    assert engine.generations[0].aborted.is_set()


class HandleEngine(FakeEngine):
    """Answers with the native engine's handle, to which a test delivers."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: asyncio.Queue[GenerationHandle] = asyncio.Queue()

    async def submit(self, request: GenerationRequest) -> Any:
        handle = GenerationHandle(request.request_id, 1, asyncio.get_running_loop(), lambda: None)
        self.handles.put_nowait(handle)
        return handle


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_events_come_whole_and_in_order_however_slowly_the_client_reads(
    path: str, body: dict[str, object]
) -> None:
    engine = HandleEngine()
    words = [f"{number} " + "x" * 500 for number in range(20_000)]
    sent = tokens(*words)
    app = app_with(engine)
    async with served(app, BoundedHttpProtocol) as port, RawConnection.to(port) as connection:
        async with asyncio.timeout(60):
            await connection.post(path, body)
            handle = await engine.handles.get()
            got = []
            for number, event in enumerate(sent):
                handle.deliver(event)
                if number == 0:
                    await connection.head()
                if number < 100 or number % 1000 == 0:
                    # Read along, then let the server's and the system's buffers fill, and read again.
                    got.append(await connection.chunk())
            while chunk := await connection.chunk():
                got.append(chunk)
    texts = [json.loads(chunk.removeprefix(b"data: ")) for chunk in got]
    shown = [event.get("text_output") or event.get("token", {}).get("text") for event in texts]
    # The last event of MindIE's own stream has the whole text in place of its own.
    assert shown[:-1] == words[:-1]
    assert texts[-1].get("text_output") == words[-1] or texts[-1]["generated_text"] == "".join(words)


async def test_an_answer_that_cannot_be_written_is_told_in_the_stream() -> None:
    engine = HandleEngine()
    bad = tokens("a", "\ud800", "c")
    async with served(app_with(engine), BoundedHttpProtocol) as port, RawConnection.to(port) as connection:
        async with asyncio.timeout(20):
            await connection.post("/infer", {"inputs": "a", "stream": True})
            handle = await engine.handles.get()
            handle.deliver(bad[0])
            await connection.head()
            assert b'"text":"a"' in await connection.chunk()
            handle.deliver(bad[1])
            assert b'"error"' in await connection.chunk()
            assert await connection.chunk() == b""
