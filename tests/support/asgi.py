"""An app under test: called in memory, or served by a real uvicorn on a free loopback port in the same event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import httpx
import uvicorn
from fastapi import FastAPI

from support.fake_engine import FakeEngine, FakeModels, FakeStatus
from support.tensor_models import PlainControl
from tengserve_adapter.control import ModelControl
from tengserve_adapter.http.app import install
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend.inference import TensorModel


def app_with(
    *models: FakeEngine,
    settings: HttpSettings | None = None,
    draining: bool = False,
    started: bool = True,
    others: tuple[FakeStatus, ...] = (),
    tensor_models: Sequence[TensorModel] = (),
    control: ModelControl | None = None,
) -> FastAPI:
    app = FastAPI()
    found: dict[str, FakeEngine | FakeStatus] = {
        **{engine.info.name: engine for engine in models},
        **{status.name: status for status in others},
    }
    fake_models = FakeModels(found, started=started, tensor_models=tensor_models)
    install(app, fake_models, settings or HttpSettings(), control=control or PlainControl(), draining=lambda: draining)
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the app in memory. It sees streams only whole, and cannot leave early."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)


@asynccontextmanager
async def served(app: FastAPI, http: type[asyncio.Protocol] | Literal["auto"] = "auto") -> AsyncIterator[int]:
    """The port of the app on a real server, which speaks HTTP as this protocol does."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(app, http=http, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield port
    finally:
        server.should_exit = True
        await task
        listener.close()


class RawConnection:
    """One TCP connection, so that a test sees exact bytes and can close when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[RawConnection]:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield connection
        finally:
            await connection.close()

    async def post(self, path: str, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> str:
        """Status line and headers."""
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" at its end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def close(self) -> None:
        self._writer.close()


def sse_events(body: str) -> list[dict[str, object]]:
    """The JSON of every event; fails on anything that is not `data: {json}` and a blank line."""
    frames = body.split("\n\n")
    assert frames.pop() == "", "the body ends with a blank line"
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]
