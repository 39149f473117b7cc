"""The short version of scripts/soak, and streams whose readers differ in speed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.soak import soak
from support.tiny_model import build_tiny_model
from tengserve_backend.engine.load import load_engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.memory_budget import MemoryBudget
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource

SMALL = MemoryBudget(bytes=512 * 2**10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], NativeEngine]]:
    """An engine with so few blocks that requests are preempted."""
    engines: list[NativeEngine] = []

    def load() -> NativeEngine:
        settings = dataclasses.replace(
            ModelSettings(),
            device="cpu",
            dtype="float32",  # whose size SMALL is made for
            max_seq_len=128,
            max_batch_size=16,
            kv_cache_memory=SMALL,
        )
        source = ModelSource("soak", "1", folder, settings)
        engines.append(load_engine(source, folder, lambda stage, fraction: None))
        return engines[-1]

    yield load
    for engine in engines:
        engine.stop()


async def test_every_request_ends_once_and_every_block_comes_back(start):
    engine = start()
    outcome = await soak(engine, requests=200, concurrency=20)
    assert outcome.wrong == []
    assert outcome.ends.total() == 200
    assert min(outcome.ends.values()) > 20
    # A request of the largest size still fits.
    largest = GenerationRequest("largest", tuple(range(3, 114)), max_new_tokens=17, ignore_eos=True)
    assert len([event async for event in await engine.submit(largest)]) == 17
    assert await engine.drain(10.0)
    status = engine.status()
    assert status.running_requests == status.waiting_requests == status.waiting_tokens == 0
    assert status.free_blocks + status.cached_blocks == status.total_blocks
    engine.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-soak")]


async def test_streams_that_are_read_at_different_speeds_are_those_of_each_alone(start):
    engine = start()
    requests = [
        GenerationRequest(str(number), f"stream number {number} of many", max_new_tokens=24, ignore_eos=True)
        for number in range(16)
    ]

    async def read(request: GenerationRequest, pauses: int) -> list[int]:
        got = []
        async for event in await engine.submit(request):
            got.append(event.token_id)
            for _ in range(pauses):
                await asyncio.sleep(0)
        return got

    alone = [await read(request, 0) for request in requests]
    assert await asyncio.gather(*(read(request, number * 20) for number, request in enumerate(requests))) == alone
    assert engine.status().preemptions > 0
