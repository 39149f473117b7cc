"""Taking in bodies: every route has the same bounds, and the server keeps what it holds small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from support.asgi import RawConnection, app_with, client_of, served
from support.fake_engine import FakeEngine
from tengserve_adapter.http import intake
from tengserve_adapter.http.intake import BodyIntake
from tengserve_adapter.http.settings import HttpSettings

PATHS = ["/infer", "/v1/models/m:explain", "/raw"]


def app_of_another(engine: FakeEngine, settings: HttpSettings) -> FastAPI:
    """Our routes, and routes that somebody else adds."""
    app = app_with(engine, settings=settings)

    @app.post("/v1/models/{name}:explain")
    async def explain(name: str, body: dict[str, Any]) -> int:
        return len(body)

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    return app


def head(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
    )


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_bounds_the_size(path: str) -> None:
    app = app_of_another(FakeEngine(), HttpSettings(max_body_bytes=1000))

    async def streamed() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 100

    async with client_of(app) as client:
        good = b'{"inputs":"a"}'
        headers = {"content-type": "application/json"}
        assert (await client.post(path, content=good, headers=headers)).status_code == 200
        for content in (b" " * 1001, streamed()):
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"] == "Request body too large. At most 1000 bytes are allowed."


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_bounds_the_time(path: str) -> None:
    app = app_of_another(FakeEngine(), HttpSettings(body_timeout_s=0.05))
    async with served(app) as port, RawConnection.to(port) as connection, asyncio.timeout(20):
        await connection.send(head(path, 50) + b"{")
        assert (await connection.head()).startswith("HTTP/1.1 408 ")


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_stops_arriving_is_not_awaited(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RATE_WINDOW_S", 0.1)
    app = app_of_another(FakeEngine(), HttpSettings())
    async with served(app) as port, RawConnection.to(port) as connection, asyncio.timeout(20):
        await connection.send(head(path, 200_000) + b" " * 150_000)
        assert (await connection.head()).startswith("HTTP/1.1 408 ")


@pytest.mark.parametrize("path", PATHS)
async def test_the_bytes_that_are_held_at_once_are_bounded(path: str) -> None:
    engine = FakeEngine()
    app = app_of_another(engine, HttpSettings(max_body_bytes=1000, max_held_body_bytes=1000))
    good = b'{"inputs":"a"}' + b" " * 486
    headers = {"content-type": "application/json"}
    async with served(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        async with RawConnection.to(port) as connection, asyncio.timeout(20):
            await connection.send(head(path, 1000) + b" " * 600)
            while (response := await client.post(path, content=good, headers=headers)).status_code == 200:
                pass
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error_type"] == "Too Many Requests"
        async with asyncio.timeout(20):
            while (await client.post(path, content=good, headers=headers)).status_code != 200:
                pass


async def test_a_body_is_not_held_while_its_answer_is_made() -> None:
    gate = asyncio.Event()
    engine = FakeEngine([gate])
    app = app_with(engine, settings=HttpSettings(max_body_bytes=1000, max_held_body_bytes=1000))
    body = b'{"inputs":"a"}' + b" " * 800
    async with served(app) as port, RawConnection.to(port) as first, RawConnection.to(port) as second:
        async with asyncio.timeout(20):
            for connection in (first, second):
                await connection.post("/infer", body)
                await engine.submissions.get()


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_not_complete_when_the_server_drains(path: str) -> None:
    draining = False
    app = app_of_another(FakeEngine(), HttpSettings())
    app.user_middleware.clear()
    app.add_middleware(BodyIntake, settings=HttpSettings(), draining=lambda: draining)
    async with served(app) as port, RawConnection.to(port) as connection, asyncio.timeout(20):
        await connection.send(head(path, 50) + b"{")
        draining = True
        answer = await connection.head()
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 5" in answer.lower()
    assert "application/json" in answer


async def test_an_answer_has_one_beginning() -> None:
    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})

    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    app = BodyIntake(twice, settings=HttpSettings(), draining=lambda: False)
    await app({"type": "http", "headers": []}, receive, send)
    assert sent == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("path", ["/infer/", "/v2/models/m/generate/", "/v2/health/live/", "/raw/"])
async def test_a_slash_too_many_is_another_url(path: str) -> None:
    async with client_of(app_of_another(FakeEngine(), HttpSettings())) as client:
        for method in ("GET", "POST"):
            response = await client.request(method, path)
            assert response.status_code == 404
            assert response.json()["error_type"] == "NotFoundError"
