"""The setting `quantization`: a model served with 8 and 4 bits, and where that is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from support.cpu_kernels import kernels_device
from support.tiny_model import build_tiny_model
from tengserve_backend.devices import select
from tengserve_backend.devices.select import select_device
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.load import load_model
from tengserve_backend.repository.settings import ModelSettings, read_settings
from tengserve_backend.repository.source import ModelSource

PROMPTS = ("hello", "a longer prompt than that one", "x", "and one more")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(tiny: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def load(**settings: Any) -> Engine:
        typed = dataclasses.replace(ModelSettings(), max_seq_len=64, device="cpu", **settings)
        engines.append(load_model(ModelSource("tiny", "1", tiny, typed), lambda stage, fraction: None))
        return engines[-1]

    yield load
    for engine in engines:
        engine.stop()


async def ids(engine: Engine, prompt: str) -> list[int]:
    generation = await engine.submit(GenerationRequest(prompt, prompt, max_new_tokens=12))
    return [event.token_id async for event in generation]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_a_model_is_served_and_answers_the_same_in_any_company(serve, quantization, dtype):
    kernels_device()
    engine = serve(quantization=quantization, dtype=dtype)
    assert "packed_linear" in engine.info.fused
    alone = [await ids(engine, prompt) for prompt in PROMPTS]
    assert all(len(answer) == 12 for answer in alone)
    assert await asyncio.gather(*(ids(engine, prompt) for prompt in PROMPTS)) == alone


def refusal(serve: Callable[..., Engine], **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        serve(**settings)
    return caught.value.message


def test_without_the_kernels_it_is_refused(serve, monkeypatch):
    assert "which needs the CPU kernels, but cpuKernels is off" in refusal(
        serve, quantization="int4", cpu_kernels="off"
    )
    none: Future[None] = Future()
    none.set_result(None)
    monkeypatch.setattr(select, "cpu_library", lambda: none)
    assert "which needs the CPU kernels, but they cannot be had" in refusal(serve, quantization="int8")


def test_float16_is_refused(serve):
    kernels_device()
    assert "needs dtype auto, float32 or bfloat16" in refusal(serve, quantization="int8", dtype="float16")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "npu", "npu:0"])
def test_other_devices_refuse_it(device):
    with pytest.raises(ConfigurationError, match=r"quantization is 'int4', but the device is (cuda|npu)"):
        select_device(device, quantization=Quantization.INT4)


def test_the_setting_takes_each_of_them():
    for quantization in Quantization:
        assert read_settings({"quantization": quantization.value}).quantization == quantization.value
    assert ModelSettings().quantization == Quantization.NONE.value
