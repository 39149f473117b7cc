"""A client that leaves ends its request at once, wherever it is, and no other."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from support.asgi import RawConnection, app_with, served
from support.fake_engine import FakeEngine, tokens
from tengserve_adapter.http.disconnect import ClientDisconnected, while_connected

REQUESTS = [
    ("/infer", {"inputs": "a"}),
    ("/infer", {"inputs": "a", "stream": True}),
    ("/infer_token", {"input_id": [1]}),
    ("/infer_token", {"input_id": [1], "stream": True}),
    ("/v2/models/smollm2/generate", {"text_input": "a"}),
    ("/v2/models/smollm2/generate_stream", {"text_input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("events_before", [0, 2])
async def test_leaving_aborts(path: str, body: dict[str, object], events_before: int) -> None:
    never = asyncio.Event()
    engine = FakeEngine([*tokens("a", "b", "c")[:events_before], never])
    streams = "stream" in body or path.endswith("_stream")
    before = asyncio.all_tasks()
    async with served(app_with(engine)) as port, asyncio.timeout(20):
        async with RawConnection.to(port) as staying, RawConnection.to(port) as leaving:
            await leaving.post(path, body)
            left = await engine.submissions.get()
            await staying.post(path, body)
            stays = await engine.submissions.get()
            await left.reading.wait()
            if streams and events_before:
                await leaving.head()
                await leaving.chunk()
            await leaving.close()
            await left.aborted.wait()
            await stays.reading.wait()
            assert not stays.aborted.is_set()
        await stays.aborted.wait()
    assert asyncio.all_tasks() == before, "no task is left behind"


async def test_leaving_while_the_request_is_submitted() -> None:
    engine = FakeEngine(submit_gate=asyncio.Event())
    before = asyncio.all_tasks()
    async with served(app_with(engine)) as port, asyncio.timeout(20):
        async with RawConnection.to(port) as connection:
            await connection.post("/infer", {"inputs": "a"})
            await engine.submitting.wait()
        await engine.submit_cancelled.wait()
    assert not engine.requests
    assert asyncio.all_tasks() == before


async def test_an_answered_request_is_not_aborted() -> None:
    engine = FakeEngine()
    async with served(app_with(engine)) as port, RawConnection.to(port) as connection, asyncio.timeout(20):
        await connection.post("/infer", {"inputs": "a"})
        assert (await connection.head()).startswith("HTTP/1.1 200")
    assert not engine.generations[0].aborted.is_set()


@pytest.mark.parametrize("told_as", [asyncio.CancelledError, RuntimeError])
async def test_leaving_ends_the_work_whatever_it_makes_of_its_end(told_as: type[BaseException]) -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        left.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise told_as from None

    before = asyncio.all_tasks()
    async with asyncio.timeout(20):
        with pytest.raises(ClientDisconnected):
            await while_connected({}, receive, work())
    assert asyncio.all_tasks() == before


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    began = asyncio.Event()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(while_connected({}, receive, work()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
