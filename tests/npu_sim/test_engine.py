"""The whole engine on the simulated NPU: its answers are the CPU's, it waits once a step, and it survives its device.

float32 and the portable attention tier give the CPU's tokens exactly. float16 and the fused tier have their own
rounding, so there the check at load stands for the logits, and each answer must be the same alone and in company.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_sim.simulator.state import FaultPoint, State
from support.tiny_model import build_tiny_model
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import EngineFailedError, GenerationFailedError, TengserveError
from tengserve_backend.execution.loader import DTYPES
from tengserve_backend.generation import GenerationRequest, SamplingParams
from tengserve_backend.repository.load import load_model
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.memory_budget import MemoryBudget
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource

_PORTABLE = {"dtype": "float32", "attention": "portable", "npu_fusions": ()}
_FUSED = {"dtype": "float16"}
_BLOCK = 128
_BYTES_PER_TOKEN = 4 * 2 * 2 * 64  # layers, key and value, heads, elements of a head; times the size of an element

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads the fused tier serves: 4 heads of 64 over 2."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), config_overrides={"hidden_size": 256, "head_dim": 64})


@pytest.fixture
def start(folder: Path, npu: State) -> Iterator[Start]:
    """Starts engines on `npu`, or on another device; all stop at the end."""
    with ExitStack() as engines:

        def started(device: str = "npu", **settings: Any) -> Engine:
            defaults = {"device": device, "max_seq_len": 1024, "max_batched_tokens": 256}
            source = ModelSource("m", "1", folder, dataclasses.replace(ModelSettings(), **(defaults | settings)))
            manager = ModelManager([source], load_model)
            engines.callback(manager.stop)
            manager.load_all()
            return manager.engine("m")

        yield started


async def ids(engine: Engine, prompt: Sequence[int], count: int = 8, **sampling: Any) -> list[int]:
    request = GenerationRequest(
        "r", tuple(prompt), max_new_tokens=count, ignore_eos=True, sampling=SamplingParams(**sampling)
    )
    return [event.token_id async for event in await engine.submit(request)]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


PROMPTS = [prompt(length, length) for length in (1, 5, 127, 128, 129, 40, 300, 17)]


async def test_portable_answers_are_those_of_the_cpu_alone_and_in_a_batch(start: Start) -> None:
    cpu = start("cpu", dtype="float32", cpu_kernels="off")
    expected = [await ids(cpu, each) for each in PROMPTS]
    engine = start(**_PORTABLE)
    assert (engine.info.device, engine.info.attention_tier) == ("npu:0", "portable")
    assert [await ids(engine, each) for each in PROMPTS] == expected
    # Prompts arrive while others decode, so steps mix both.
    assert await asyncio.gather(*(ids(engine, each) for each in PROMPTS)) == expected


async def test_a_snapshot_buffer_that_is_used_again_too_early_shows_in_the_answers(
    start: Start, npu: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that `NpuDevice.upload` avoids, planted: copies that nobody waits for, out of one buffer."""
    cpu = start("cpu", dtype="float32", cpu_kernels="off")
    expected = [await ids(cpu, each) for each in PROMPTS[:3]]
    buffer = torch.empty(65536, dtype=torch.int32).pin_memory()

    def careless(device: NpuDevice, host: torch.Tensor) -> torch.Tensor:
        staged = buffer[: len(host)].copy_(host)
        there = torch.empty(len(host), dtype=host.dtype, device=device.torch_device).copy_(staged, non_blocking=True)
        buffer.zero_()
        return there

    engine = start(**_PORTABLE)
    monkeypatch.setattr(NpuDevice, "upload", careless)
    for each, answer in zip(PROMPTS, expected, strict=False):
        # Zeros for indices read memory that nobody wrote, which holds no numbers here.
        with pytest.raises(GenerationFailedError, match="no finite scores"):
            assert await ids(engine, each) == answer
    monkeypatch.undo()
    assert [await ids(engine, each) for each in PROMPTS[:3]] == expected


async def test_fused_answers_are_the_same_alone_and_in_a_batch(start: Start) -> None:
    engine = start(**_FUSED)
    assert engine.info.attention_tier == "npu-fused"
    alone = [await ids(engine, each) for each in PROMPTS]
    assert await asyncio.gather(*(ids(engine, each) for each in PROMPTS)) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)


@pytest.mark.parametrize("settings", [_PORTABLE, _FUSED], ids=["portable", "fused"])
async def test_a_prefix_hit_changes_no_answer(start: Start, settings: dict[str, Any]) -> None:
    engine = start(max_seq_len=512, **settings)
    first = prompt(2 * _BLOCK + 5, 7)
    other = first[: _BLOCK + 3] + prompt(30, 8)
    fresh = start(prefix_caching=False, max_seq_len=512, **settings)
    expected = [await ids(fresh, each) for each in (first, first, other)]
    assert [await ids(engine, each) for each in (first, first, other)] == expected
    # The second asks for all of the first again, the third for its first block and a little.
    assert engine.status().prefix_hit_tokens >= 2 * _BLOCK + _BLOCK


@pytest.mark.parametrize("settings", [_PORTABLE, _FUSED], ids=["portable", "fused"])
async def test_preemption_changes_no_answer(start: Start, settings: dict[str, Any]) -> None:
    prompts = [prompt(120, seed) for seed in range(3)]
    alone = start(**settings)
    expected = [await ids(alone, each, 20) for each in prompts]
    # Room for three blocks of 128 tokens; the three answers need six, or 26 of 16 tokens.
    cache = MemoryBudget(bytes=3 * _BLOCK * _BYTES_PER_TOKEN * DTYPES[settings["dtype"]].itemsize)
    small = start(kv_cache_memory=cache, **settings)
    assert await asyncio.gather(*(ids(small, each, 20) for each in prompts)) == expected
    assert small.status().preemptions > 0


async def test_a_seeded_answer_is_the_cpus(start: Start) -> None:
    sampling = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.2}
    expected = await ids(start("cpu", dtype="float32", cpu_kernels="off"), PROMPTS[2], 24, **sampling)
    engine = start(**_PORTABLE)
    together = await asyncio.gather(*(ids(engine, PROMPTS[2], 24, **sampling) for _ in range(3)))
    assert together == [expected] * 3


async def test_who_leaves_takes_its_blocks_along_and_disturbs_nobody(start: Start) -> None:
    engine = start(**_FUSED)
    expected = await ids(engine, PROMPTS[3], 40)
    leaving = await engine.submit(GenerationRequest("r", tuple(PROMPTS[6]), max_new_tokens=500, ignore_eos=True))
    staying = asyncio.create_task(ids(engine, PROMPTS[3], 40))
    for _ in range(3):
        await anext(leaving)
    leaving.abort()
    assert await staying == expected
    status = engine.status()
    assert status.free_blocks + status.cached_blocks == status.total_blocks


@pytest.mark.parametrize("failures", [2, 4])
async def test_a_lack_of_memory_makes_the_batch_smaller_and_loses_nobody(
    start: Start, npu: State, failures: int
) -> None:
    # Steps so large that their activations do not fit into what torch_npu keeps for small tensors.
    engine = start(max_batched_tokens=1536, prefix_caching=False, **_PORTABLE)
    prompts = [prompt(384, seed) for seed in range(4)]
    expected = [await ids(engine, each, 4) for each in prompts]
    torch.npu.empty_cache()
    # torch_npu empties its cache and tries again before it raises, so two refusals are one error.
    npu.malloc_failures = failures
    assert await asyncio.gather(*(ids(engine, each, 4) for each in prompts)) == expected
    assert npu.malloc_refusals >= failures
    assert engine.status().alive


@pytest.mark.parametrize("point", list(FaultPoint), ids=lambda point: point.name)
async def test_a_lost_device_ends_every_request_at_once(start: Start, npu: State, point: FaultPoint) -> None:
    engine = start(**_FUSED)
    generations = [
        await engine.submit(GenerationRequest("r", tuple(each), max_new_tokens=500, ignore_eos=True))
        for each in PROMPTS
    ]
    for generation in generations:
        await anext(generation)
    npu.break_device(507015, point)
    for generation in generations:
        with pytest.raises(EngineFailedError):
            async for _ in generation:
                pass
    assert not engine.status().alive
    with pytest.raises(TengserveError):
        await engine.submit(GenerationRequest("r", (5,)))
