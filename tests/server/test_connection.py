"""The bounds and the manners of a connection that uvicorn leaves open, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tengserve_adapter.http import connection, transport
from tengserve_adapter.http.connection import BoundedHttpProtocol

pytestmark = pytest.mark.timeout(60)

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(
    app: Any, *, state: ServerState | None = None, make: Any = BoundedHttpProtocol, **options: Any
) -> AsyncIterator[int]:
    """The port of an app behind the protocol."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, **options)
    state = state or ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in list(state.tasks):
            task.cancel()
        for one in list(state.connections):
            one.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells; pytest's timeout ends the wait."""
    while not condition():  # noqa: ASYNC110 - uvicorn's state has no events
        await asyncio.sleep(0.01)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(echo) as port:
        yield port


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Client]:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            client.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and the body that Content-Length measures."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body

    async def end(self) -> bytes:
        """What is left to read until the server closes; a reset is as good an end as an orderly close."""
        left = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                left += data
        return left


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"\r\n"])
async def test_a_head_that_does_not_come_closes_the_connection(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with Client.to(port) as client:
        await client.send(sent)
        assert await client.end() == b""


async def test_blank_lines_after_an_answer_do_not_keep_a_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with Client.to(port) as client:
        await client.send(HEAD + b"Content-Length: 2\r\n\r\nhi")
        assert (await client.answer())[2] == b"hi"
        await client.send(b"\r\n")
        assert await client.end() == b""


async def test_a_connection_that_waits_between_requests_is_kept(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with Client.to(port) as client:
        for _ in range(2):
            await client.send(HEAD + b"\r\n")
            assert (await client.answer())[0] == 200
            # Past the head's timeout, of which no event tells.
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, nonsense"])
@pytest.mark.parametrize("pieces", [1, 2, 300])
async def test_an_offer_to_upgrade_is_ignored(port: int, offer: bytes, pieces: int) -> None:
    upgrade = HEAD + b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: " + offer + b"\r\n"
    sent = b"".join(
        (
            upgrade + b"Content-Length: 5\r\n\r\nhello",
            upgrade + b"\r\n",
            upgrade + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
            HEAD + b"Content-Length: 3\r\n\r\nend",
        )
    )
    step = -(-len(sent) // pieces)
    async with Client.to(port) as client:
        for start in range(0, len(sent), step):
            await client.send(sent[start : start + step])
            await asyncio.sleep(0)
        answers = [await client.answer() for _ in range(4)]
    assert [(status, body) for status, _, body in answers] == [(200, b"hello"), (200, b""), (200, b"hi"), (200, b"end")]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
        b"GET /",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: ",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;",
    ],
    ids=["header", "target", "headers", "trailer", "chunk extension"],
)
async def test_what_brings_a_request_no_further_is_bounded(port: int, sent: bytes) -> None:
    async with Client.to(port) as client:
        await client.send(sent)
        filler = b"a: b\r\n" * 10_000 if sent.endswith(b"y\r\n") else b"a" * 60_000
        reading = asyncio.create_task(client.reader.read(65536))
        sizes = 0
        while not reading.done() and sizes < 100:
            await client.send(filler)
            sizes += 1
            await asyncio.sleep(0)
        assert sizes < 100, "the server took it all"
        with contextlib.suppress(ConnectionError):
            assert (await reading).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
async def test_what_is_not_http_is_told_so_in_json(port: int, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with Client.to(port) as client:
        await client.send(sent)
        status, headers, body = await client.answer()
        assert await client.end() == b""
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert json.loads(body)["error_type"] == "Bad Request"
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_what_is_wrong_behind_a_request_does_not_disturb_its_answer() -> None:
    gate = asyncio.Event()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await gate.wait()
        await echo(scope, receive, send)

    async with serving(late) as port, Client.to(port) as client:
        await client.send(HEAD + b"Content-Length: 2\r\n\r\nhi" + b"nonsense\r\n\r\n")
        gate.set()
        assert (await client.answer())[2] == b"hi"
        assert (await client.answer())[0] == 400


async def test_a_body_that_is_not_http_is_the_end_of_its_request(port: int) -> None:
    async with Client.to(port) as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nnonsense\r\n")
        assert (await client.answer())[0] == 400
        assert await client.end() == b""


async def two_events(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for event in (b"data: {}\n\n", b"data: {}\n\n", b""):
        await send({"type": "http.response.body", "body": event, "more_body": bool(event)})


async def test_http_1_0_gets_a_stream_without_chunks() -> None:
    async with serving(two_events) as port, Client.to(port) as client:
        await client.send(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert await client.end() == b"data: {}\n\ndata: {}\n\n"


async def test_http_1_0_gets_an_answer_with_its_length(port: int) -> None:
    async with Client.to(port) as client:
        await client.send(b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
        assert (await client.answer())[2] == b"hi"
        assert await client.end() == b""


async def test_every_pipelined_request_is_told_that_its_client_left(caplog: pytest.LogCaptureFixture) -> None:
    state = ServerState()
    served = 0
    last: list[str] = []

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal served
        served += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        last.append("disconnect")
        raise RuntimeError("an app may fail when its client has left")

    async with serving(waiting, state=state) as port:
        async with Client.to(port) as client:
            await client.send((HEAD + b"Content-Length: 2\r\n\r\nhi") * 10)
            await until(lambda: served == 1)
        await until(lambda: not state.connections and not state.tasks)
    assert (served, last) == (1, ["disconnect"])
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_a_client_that_leaves_its_answers_makes_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    state = ServerState()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await echo(scope, receive, send)
        await echo(scope, receive, send)

    async with serving(slow, state=state) as port:
        async with Client.to(port) as client:
            await client.send((HEAD + b"Content-Length: 2\r\n\r\nhi") * 1000)
            await client.answer()
        await until(lambda: not state.connections and not state.tasks)
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_requests_behind_requests_are_not_read_for_ever() -> None:
    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(waiting) as port, Client.to(port) as client:
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while sent < 100_000:
                    await client.send((HEAD + b"\r\n") * 1000)
                    sent += 1
        assert sent < 100_000, "the server took them all"


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    async with Client.to(port) as client:
        for number in range(100):
            client.writer.write(HEAD + b"Content-Length: 3\r\n\r\n%03d" % number)
        for number in range(100):
            assert (await client.answer())[2] == b"%03d" % number


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
async def test_an_answer_that_nobody_reads_does_not_hold_the_connection(
    close: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT_S", 0.1)
    state = ServerState()
    size = 64 * 1024 * 1024

    async def big(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    async with serving(big, state=state, timeout_keep_alive=0) as port, Client.to(port) as client:
        await client.send(HEAD + close + b"\r\n")
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        await until(lambda: not state.connections)


@pytest.mark.parametrize("start", [HEAD, HEAD + b"Connection: close\r\n", b"POST / HTTP/1.0\r\n"])
async def test_an_answer_before_the_end_of_the_body_arrives_and_the_rest_is_not_awaited(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "DISCARD_TIMEOUT_S", 0.3)
    state = ServerState()

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with serving(refuse, state=state) as port, Client.to(port) as client:
        await client.send(start + b"Content-Length: 2000000000\r\n\r\n" + bytes(4_000_000))
        status, _, body = await client.answer()
        assert (status, body) == (413, b"no")
        sending = asyncio.create_task(client.end())
        while not sending.done():
            await client.send(b"x" * 1000)
            await asyncio.sleep(0)
        await until(lambda: not state.connections)


async def test_a_connection_goes_on_after_a_body_that_was_answered_early() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with serving(refuse) as port, Client.to(port) as client:
        for _ in range(2):
            await client.send(HEAD + b"Content-Length: 100000\r\n\r\n")
            assert (await client.answer())[0] == 413
            await client.send(bytes(100_000))


async def test_a_client_that_ends_its_sending_side_has_left() -> None:
    left = asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(waiting) as port, Client.to(port) as client:
        await client.send(HEAD + b"Content-Length: 2\r\n\r\nhi")
        client.writer.write_eof()
        await left.wait()
        assert await client.end() == b""


async def test_a_task_that_outlives_the_server_makes_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    state = ServerState()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async with serving(endless, state=state) as port, Client.to(port) as client:
        await client.send(HEAD + b"\r\n")
        await until(lambda: bool(state.tasks))
        for task in state.tasks:
            task.cancel()
        assert await client.end() == b""
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_beyond_the_limit_of_connections_only_probes_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SPARE_HEAD_TIMEOUT_S", 0.1)
    state = ServerState()
    make = functools.partial(BoundedHttpProtocol, max_connections=2)
    async with serving(echo, state=state, make=make) as port, Client.to(port) as first, Client.to(port) as second:
        for client in (first, second):
            await client.send(HEAD + b"\r\n")
            assert (await client.answer())[0] == 200
        async with Client.to(port) as refused, Client.to(port) as probe, Client.to(port) as silent:
            await refused.send(HEAD + b"Content-Length: 2\r\n\r\nhi")
            status, headers, body = await refused.answer()
            assert (status, headers["connection"]) == (503, "close")
            assert int(headers["retry-after"]) > 0
            assert json.loads(body)["error_type"] == "Service Unavailable"
            assert await refused.end() == b""
            await probe.send(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await probe.answer())[0] == 200
            assert await silent.end() == b""
        await first.send(HEAD + b"\r\n")
        assert (await first.answer())[0] == 200, "those who were there first are served"
        second.writer.close()
        await until(lambda: len(state.connections) == 1)
        async with Client.to(port) as client:
            await client.send(HEAD + b"\r\n")
            assert (await client.answer())[0] == 200


async def test_far_beyond_the_limit_nobody_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 0)
    make = functools.partial(BoundedHttpProtocol, max_connections=1)
    async with serving(echo, make=make) as port, Client.to(port) as first:
        await first.send(HEAD + b"\r\n")
        await first.answer()
        async with Client.to(port) as refused:
            assert await refused.end() == b""
