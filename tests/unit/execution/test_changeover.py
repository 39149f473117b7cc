"""Kernels that are ready only after the start: the same stream goes on, from the next step on the faster way."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path

import pytest

from support.cpu_kernels import kernels_device
from support.tiny_model import build_tiny_model
from tengserve_backend.devices import select
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.load import load_engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.native.load import CpuLibrary, cpu_library
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource

PROMPTS = [tuple(range(5 + index, 45 + index)) for index in range(3)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def promise(monkeypatch: pytest.MonkeyPatch) -> Future[CpuLibrary | None]:
    """What the server is promised; the test keeps the promise."""
    promised: Future[CpuLibrary | None] = Future()
    monkeypatch.setattr(select, "cpu_library", lambda: promised)
    return promised


def start(weights: Path, **settings: str) -> NativeEngine:
    source = ModelSource("story", "1", weights, ModelSettings(device="cpu", dtype="float32", **settings))
    return load_engine(source, weights, lambda stage, fraction: None)


async def ids(engine: NativeEngine, prompt: tuple[int, ...], count: int = 60) -> list[int]:
    generation = await engine.submit(GenerationRequest("r", prompt, max_new_tokens=count, ignore_eos=True))
    return [event.token_id async for event in generation]


async def changed(engine: NativeEngine, tier: str) -> None:
    async with asyncio.timeout(120):
        while engine.info.attention_tier != tier:  # noqa: ASYNC110 - made true by the engine's thread, which sets no event
            await asyncio.sleep(0.01)


async def test_streams_go_on_over_the_change(weights, promise, caplog):
    kernels_device()
    caplog.set_level(logging.INFO)
    engine = start(weights)
    try:
        assert engine.info.attention_tier == "portable"
        expected = [await ids(engine, prompt) for prompt in PROMPTS]
        generations = [
            await engine.submit(GenerationRequest("r", prompt, max_new_tokens=60, ignore_eos=True))
            for prompt in PROMPTS
        ]
        got = [[(await anext(aiter(generation))).token_id] for generation in generations]
        promise.set_result(cpu_library().result())
        for tokens, generation in zip(got, generations, strict=True):
            tokens += [event.token_id async for event in generation]
        assert got == expected
        await changed(engine, "cpu-paged")
        # What was in the cache is still there, in the layout of the kernels.
        hits = engine.status().prefix_hit_tokens
        assert [await ids(engine, prompt) for prompt in PROMPTS] == expected
        assert engine.status().prefix_hit_tokens >= hits + 32 * len(PROMPTS)
        assert engine.status().preemptions == 0
    finally:
        engine.stop()
    assert "goes over to fused operators: rms_norm (9), rotary (1), swiglu (4), packed_linear" in caplog.text
    assert "goes over to attention cpu-paged" in caplog.text


async def test_an_idle_server_goes_over_too(weights, promise):
    kernels_device()
    engine = start(weights)
    try:
        promise.set_result(cpu_library().result())
        await changed(engine, "cpu-paged")
        assert len(await ids(engine, PROMPTS[0], 5)) == 5
    finally:
        engine.stop()


async def test_attention_stays_portable_where_that_was_asked_for(weights, promise, caplog):
    kernels_device()
    caplog.set_level(logging.INFO)
    engine = start(weights, attention="portable")
    try:
        promise.set_result(cpu_library().result())
        assert len(await ids(engine, PROMPTS[0])) == 60
    finally:
        engine.stop()
    assert engine.info.attention_tier == "portable"
    assert "goes over to attention" not in caplog.text


@pytest.mark.parametrize("failed", [False, True])
async def test_without_kernels_it_stays_as_it_is(weights, promise, failed):
    engine = start(weights)
    try:
        if failed:
            promise.set_exception(OSError("no"))
        else:
            promise.set_result(None)
        assert len(await ids(engine, PROMPTS[0], 5)) == 5
        assert engine.info.attention_tier == "portable"
    finally:
        engine.stop()


async def test_kernels_can_be_switched_off(weights, monkeypatch):
    def asked() -> None:
        raise AssertionError("nobody wants them")

    monkeypatch.setattr(select, "cpu_library", asked)
    engine = start(weights, cpu_kernels="off")
    engine.stop()
    assert (engine.info.attention_tier, engine.info.dtype) == ("portable", "float32")


def test_a_stopped_engine_is_left_alone(weights, promise):
    engine = start(weights)
    engine.stop()
    promise.set_result(CpuLibrary("none"))
    assert engine.info.attention_tier == "portable"


def test_the_dtype_follows_the_cpu_unless_nothing_is_to_be_packed(monkeypatch):
    import torch

    there: Future[CpuLibrary | None] = Future()
    there.set_result(CpuLibrary("none"))
    absent: Future[CpuLibrary | None] = Future()
    absent.set_result(None)
    devices = [CpuDevice(), CpuDevice(absent), CpuDevice(Future()), CpuDevice(there)]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    dtypes = [device.default_dtype(torch.float32) for device in devices]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert {device.default_dtype(torch.bfloat16) for device in devices} == {torch.float32}
