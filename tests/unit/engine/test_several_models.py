"""Real models side by side in one process: each with its own loop and pages, and memory that really comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.tiny_model import build_tiny_model
from tengserve_backend.errors import ConfigurationError, ModelNotReadyError, RequestAbortedError
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.load import load_model
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource, Progress

SETTINGS = dataclasses.replace(ModelSettings(), device="cpu", max_seq_len=256)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = {"llama": 20, "qwen3": 21}
    return {name: build_tiny_model(tmp_path_factory.mktemp(name), name, seed=seed) for name, seed in names.items()}


@pytest.fixture
def manager(folders: dict[str, Path]) -> Iterator[ModelManager]:
    made = ModelManager([source(folders, name) for name in folders], load_model)
    made.load_all()
    yield made
    made.stop()


def source(folders: dict[str, Path], name: str) -> ModelSource:
    return ModelSource(name, "1", folders[name], SETTINGS)


async def answer(manager: ModelManager, name: str, prompt: str, count: int = 24) -> list[int]:
    generation = await manager.engine(name).submit(
        GenerationRequest("r", prompt, max_new_tokens=count, ignore_eos=True)
    )
    return [event.token_id async for event in generation]


def living(architecture: str) -> int:
    """Models of an architecture that are still in memory."""
    return sum(type(thing).__name__ == architecture for thing in gc.get_objects())


async def test_models_answer_at_the_same_time_as_they_do_alone(manager, folders):
    prompts = [f"{number} tokens at a time" for number in range(4)]
    asked = [(name, prompt) for prompt in prompts for name in folders]
    alone = [await answer(manager, *question) for question in asked]
    together = await asyncio.gather(*(answer(manager, *question) for question in asked))
    assert list(together) == alone
    assert alone[0] != alone[1]


async def test_loads_beside_a_stream_do_not_change_it(manager, folders):
    expected = await answer(manager, "llama", "a stream", 200)
    stream = asyncio.create_task(answer(manager, "llama", "a stream", 200))
    other = await answer(manager, "qwen3", "and another")
    for _ in range(2):
        await asyncio.to_thread(manager.load, source(folders, "qwen3"))
        assert await answer(manager, "qwen3", "and another") == other
    assert await stream == expected


async def test_an_unloaded_model_is_gone_whoever_still_holds_its_answer(manager, folders):
    engine = manager.engine("qwen3")
    generation = await engine.submit(GenerationRequest("r", "hello", max_new_tokens=200, ignore_eos=True))
    await anext(generation)
    assert living("Qwen3ForCausalLM") == 1
    await asyncio.to_thread(manager.unload, "qwen3", retire_timeout_s=0.0)
    with pytest.raises(RequestAbortedError):
        async for _ in generation:
            pass
    with pytest.raises(ModelNotReadyError):
        await engine.submit(GenerationRequest("r", "hello"))
    assert living("Qwen3ForCausalLM") == 0
    assert living("LlamaForCausalLM") == 1
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("qwen3")]
    assert len(await answer(manager, "llama", "hello")) == 24
    await asyncio.to_thread(manager.load, source(folders, "qwen3"))
    assert len(await answer(manager, "qwen3", "hello")) == 24


async def test_a_load_that_fails_late_leaves_nothing(folders):
    def load(source: ModelSource, progress: Progress):
        def report(stage: str, fraction: float) -> None:
            if stage == "checking the forward":
                raise ConfigurationError("stopped here")

        return load_model(source, report)

    manager = ModelManager([source(folders, "llama")], load)
    manager.load_all()
    assert [status.reason for status in manager.statuses()] == ["stopped here"]
    assert living("LlamaForCausalLM") == 0


def test_memory_comes_back_to_the_system(tmp_path: Path) -> None:
    """Weights in bfloat16 become float32 at the load, so they are the process's own memory: about 100 MiB."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    folder = build_tiny_model(tmp_path, config_overrides={**sizes, "head_dim": 64}, dtype=torch.bfloat16)
    done = subprocess.run(
        [sys.executable, "-m", "support.memory_of_models", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=120,
        check=True,
    )
    memory = json.loads(done.stdout)
    # The allocator rounds in its own way, an arena of 64 MiB at a time: a mean, and the least of the first and the last
    # cycles. A model that stays behind at each unload would make 300 MiB between these.
    loaded, unloaded = memory["loaded"], memory["unloaded"]
    assert statistics.mean(loaded) - statistics.mean(unloaded) > 40 * 2**20
    assert min(unloaded[3:]) - min(unloaded[:3]) < 150 * 2**20
