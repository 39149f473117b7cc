"""The bounds of a connection that uvicorn leaves open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tengserve_adapter import listener
from tengserve_adapter.listener import BoundedHttpProtocol


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.2)
    config = uvicorn.Config(hello, lifespan="off", ws="none", log_config=None)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedHttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
async def test_a_head_that_does_not_come_closes_the_connection(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    # A reset is as good an end as an orderly close; without either, pytest's timeout ends the test.
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_waits_between_requests_is_kept(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204 ")
        # Past the head's timeout, of which no event tells.
        await asyncio.sleep(2 * listener.HEAD_TIMEOUT_S)
    writer.close()
    await writer.wait_closed()
