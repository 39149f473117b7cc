"""Engines over tiny random models, and what transformers itself answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from support.architectures import PACKED, PER_SEQUENCE, VOCAB_SIZE, build_model
from support.cpu_kernels import kernels_device
from support.scripted_model import ByteTokenizer
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.assembly import Capacity, assemble
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.generation import ModelLimits
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.scheduler import SchedulerLimits


@dataclass(slots=True)
class Oracle:
    """One architecture: engines that serve it, and transformers' own answers."""

    name: str
    served: Any
    reference: Any
    device: CpuDevice
    _engines: list[NativeEngine] = field(default_factory=list)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers' generate answers, alone, with eager attention."""
        # A copy, for dynamic rotary embeddings remember the longest sequence that a model has seen.
        out = copy.deepcopy(self.reference).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
        )
        return list(out[0, len(prompt) :].tolist())

    def start(self, *, budget: int = 128, running: int = 8, blocks: int = 512, sharing: bool = True) -> NativeEngine:
        """An engine with a step size and a cache size of choice; `stop` ends it."""
        if self.name in PACKED:
            self.served.set_attn_implementation("sdpa" if self.served._supports_sdpa else "eager")
        device = self.device
        choice = choose_forward(self.served, device, vocab_size=VOCAB_SIZE, dtype=torch.float32)
        assert choice.packed == (self.name in PACKED), choice.reason
        if choice.attention is not None:
            assert choice.attention.name == device.attention_tiers((), torch.float32)[0].name
        forward = build_forward(choice, self.served, total_blocks=blocks, device=device, dtype=torch.float32)
        engine = assemble(
            forward=forward,
            info=ModelInfo(
                name=self.name,
                version="1",
                architecture=type(self.served).__name__,
                vocab_size=VOCAB_SIZE,
                limits=ModelLimits(max_seq_len=256, max_input_len=255, max_iter_times=256),
                full_text_enabled=False,
                device="cpu",
                dtype="float32",
                attention_tier=forward.tier,
            ),
            defaults=ModelDefaults(top_k=0, eos_ids=frozenset()),
            tokenizer=ByteTokenizer(),
            device=device,
            capacity=Capacity(
                steps=SchedulerLimits(StepTokens(budget, beside_streams=budget), max_running=running),
                total_blocks=blocks,
                max_waiting_requests=64,
                max_waiting_tokens=100_000,
                prefix_caching=sharing and choice.packed,
            ),
        )
        self._engines.append(engine)
        return engine

    def stop(self) -> None:
        while self._engines:
            self._engines.pop().stop()


def _oracle(name: str, device: CpuDevice) -> Oracle:
    reference = build_model(name)
    reference.set_attn_implementation("eager")
    served = build_model(name)
    device.fuse(served, ())
    return Oracle(name, served, reference, device)


@pytest.fixture(scope="module", params=["portable", "kernels"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    """The CPU by plain torch operators, and by our own."""
    return CpuDevice() if request.param == "portable" else kernels_device()


@pytest.fixture(scope="module", params=[*PACKED, *PER_SEQUENCE])
def architecture(request: pytest.FixtureRequest, device: CpuDevice) -> Oracle:
    """Every architecture in turn; built once for all tests of a module."""
    return _oracle(request.param, device)


@pytest.fixture
def oracle(architecture: Oracle) -> Iterator[Oracle]:
    """The architecture, its engines stopped at the end of the test."""
    yield architecture
    architecture.stop()


@pytest.fixture(scope="session")
def llama() -> Callable[[CpuDevice], Oracle]:
    """One architecture for tests that are not about architectures."""
    return lambda device: _oracle("llama", device)
