"""A small HTTP/1.1 client for streams of events, made to cost little beside the server that it measures.

Each request has a connection of its own: none can be found closed by the server, and all servers are treated alike.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from tengserve_adapter.bench.requests import AnswerError
from tengserve_backend.errors import ConfigurationError, shown

_MAX_LINE: Final = 1 << 20
_MAX_BODY: Final = 16 << 20
_MAX_SHOWN: Final = 500
_STATUS: Final = re.compile(r"HTTP/1\.[01] (\d{3})\b", re.ASCII)
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is.

    Attributes:
        secure: whether it speaks TLS.
        host, port: its address.
        path: what comes before the paths of its API; no slash at its end.
    """

    secure: bool
    host: str
    port: int
    path: str

    @staticmethod
    def of(url: str) -> Place:
        """From a URL.

        Raises:
            ConfigurationError: it is none with http or https and a host.
        """
        try:
            parts = urlsplit(url)
            if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
                raise ValueError
            port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            raise ConfigurationError(f"a server must be given as http://HOST:PORT, got {shown(url)!r}") from None
        return Place(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))

    @property
    def address(self) -> str:
        """Host and port in one word."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def get_json(place: Place, path: str) -> Any:
    """The JSON that a GET answers with.

    Raises:
        AnswerError: another answer, or none.
    """
    async with _Exchange(place, "GET", path, b"") as exchange:
        body = b"".join([piece async for piece in exchange.pieces()])
    return _parsed(body)


async def post_events(place: Place, path: str, body: object) -> AsyncIterator[Any]:
    """POST a JSON body, and yield the JSON of each event of the answer as it comes. `[DONE]` is none.

    Raises:
        AnswerError: no stream of such events.
    """
    rest = b""
    async with _Exchange(place, "POST", path, orjson.dumps(body)) as exchange:
        async for piece in exchange.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data != b"[DONE]":
                        yield _parsed(data)
                elif line.startswith(b"{"):
                    # An error in place of events, as some servers send it.
                    raise AnswerError(f"the answer is no stream of events: {_shown(line)}")
            if len(rest) > _MAX_LINE:
                raise AnswerError(f"an event is longer than {_MAX_LINE} bytes")
    if rest.strip():
        raise AnswerError(f"the answer ends within an event: {_shown(rest)}")


class _Exchange:
    """One request on its own connection."""

    def __init__(self, place: Place, method: str, path: str, body: bytes) -> None:
        self._place = place
        head = (
            f"{method} {place.path}{path} HTTP/1.1\r\nHost: {place.address}\r\nAccept: text/event-stream, */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._request = head.encode() + body

    async def __aenter__(self) -> _Exchange:
        try:
            self._reader, self._writer = await asyncio.open_connection(
                self._place.host, self._place.port, ssl=self._place.secure or None, limit=_MAX_LINE
            )
        except OSError as error:
            raise AnswerError(f"no connection to {self._place.address}: {error.strerror or error}") from error
        self._writer.write(self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of a 200 as it comes."""
        try:
            status, length, chunked = await self._head()
            pieces = self._chunks() if chunked else self._bytes(length)
            if status != 200:
                body = b"".join([piece async for piece in pieces])
                raise AnswerError(f"the answer is a {status}: {_shown(body)}")
            async for piece in pieces:
                yield piece
        except asyncio.IncompleteReadError as error:
            raise AnswerError("the connection ended within the answer") from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise AnswerError(f"the answer is no HTTP: {error}") from error
        except OSError as error:
            raise AnswerError(f"the connection broke: {error.strerror or error}") from error

    async def _head(self) -> tuple[int, int | None, bool]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = _STATUS.match(lines[0])
        if status is None:
            raise ValueError(shown(lines[0]))
        fields = dict(line.lower().split(":", 1) for line in lines[1:] if ":" in line)
        length = fields.get("content-length")
        chunked = "chunked" in fields.get("transfer-encoding", "")
        return int(status[1]), None if length is None else int(length), chunked

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            if size > _MAX_BODY:
                raise ValueError(f"a chunk of {size} bytes")
            yield (await self._reader.readexactly(size + 2))[:-2]

    async def _bytes(self, length: int | None) -> AsyncIterator[bytes]:
        left = _MAX_BODY if length is None else length
        while left > 0 and (piece := await self._reader.read(min(left, 1 << 16))):
            left -= len(piece)
            yield piece
        if length is not None and left > 0:
            raise asyncio.IncompleteReadError(b"", left)


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise AnswerError(f"this is no JSON: {_shown(data)}") from None


def _shown(data: bytes) -> str:
    return shown(data.decode("utf-8", "replace"), _MAX_SHOWN)
