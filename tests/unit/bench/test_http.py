"""Bytes from a socket to events, whatever way they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tengserve_adapter.bench.http import Place, get_json, post_events
from tengserve_adapter.bench.requests import AnswerError
from tengserve_backend.errors import ConfigurationError

EVENTS = b'data: {"a": 1}\n\ndata:{"a": 2}\r\n\r\n: a comment\n\ndata: [DONE]\n\n'


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x;extension\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def sized(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[Place, list[bytes]]]:
    """A server that answers everything with these bytes and closes; where it is, and what it got."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        got.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield Place.of(f"http://127.0.0.1:{port}/base/"), got


async def events(answer: bytes) -> list[Any]:
    async with answering(answer) as (place, _):
        return [event async for event in post_events(place, "/infer", {"x": 1})]


@pytest.mark.parametrize(
    "answer",
    [
        sized(EVENTS),
        b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS,
        chunked(EVENTS),
        chunked(EVENTS[:9], EVENTS[9:15], EVENTS[15:16], EVENTS[16:]),
        chunked(*(EVENTS[at : at + 1] for at in range(len(EVENTS)))),
    ],
)
async def test_events_are_the_same_however_they_come(answer: bytes) -> None:
    assert await events(answer) == [{"a": 1}, {"a": 2}]


async def test_a_request_is_json_to_the_path_below_the_url_s() -> None:
    async with answering(sized(EVENTS)) as (place, got):
        assert [event async for event in post_events(place, "/infer", {"x": "é"})]
    (sent,) = got
    assert sent.startswith(b"POST /base/infer HTTP/1.1\r\n")
    assert f"\r\nHost: {place.address}\r\n".encode() in sent
    assert sent.endswith(b'\r\n\r\n{"x":"\xc3\xa9"}')


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sized(b'{"error":"full"}', b"503 Service Unavailable"), r'a 503: \{"error":"full"\}'),
        (sized(b'{"error":"full"}\n'), "no stream of events"),
        (sized(b'{"generated_text":"x"}'), "ends within an event"),
        (sized(b"data: {\n\n"), "no JSON"),
        (sized(EVENTS)[:-5], "ended within the answer"),
        (chunked(EVENTS)[:-5], "ended within the answer"),
        (b"HTTP/1.1 200 OK\r\n", "ended within the answer"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", "no HTTP"),
    ],
)
async def test_what_is_no_such_stream_is_told(answer: bytes, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        await events(answer)


async def test_nobody_there() -> None:
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    with pytest.raises(AnswerError, match=f"no connection to 127.0.0.1:{port}"):
        await get_json(Place.of(f"http://127.0.0.1:{port}"), "/v2")


async def test_json_of_a_get() -> None:
    async with answering(sized(b'{"models":["m"]}')) as (place, got):
        assert await get_json(place, "/v1/models") == {"models": ["m"]}
    assert got[0].startswith(b"GET /base/v1/models ")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://h", "http://", "http://h:99999", "http://h/?q", "http://h/#f"])
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(ConfigurationError, match="must be given as http://HOST:PORT"):
        Place.of(url)


def test_places() -> None:
    assert Place.of("https://h") == Place(True, "h", 443, "")
    assert Place.of("http://[::1]:8080/a/").address == "[::1]:8080"
