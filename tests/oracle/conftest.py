"""Engines over tiny random models, and what transformers itself answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from support.architectures import PACKED, PER_SEQUENCE, VOCAB_SIZE, build_model
from support.scripted_model import ByteTokenizer
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.assembly import Capacity, assemble
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.generation import ModelLimits
from tengserve_backend.scheduling.scheduler import SchedulerLimits


@dataclass(slots=True)
class Oracle:
    """One architecture: engines that serve it, and transformers' own answers."""

    name: str
    served: Any
    reference: Any
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

    def start(
        self, *, budget: int = 128, chunk: int = 128, running: int = 8, blocks: int = 512, sharing: bool = True
    ) -> NativeEngine:
        """An engine with a step size and a cache size of choice; `stop` ends it."""
        if self.name in PACKED:
            self.served.set_attn_implementation("sdpa" if self.served._supports_sdpa else "eager")
        device = CpuDevice()
        choice = choose_forward(self.served, device, vocab_size=VOCAB_SIZE, dtype=torch.float32)
        assert choice.packed == (self.name in PACKED), choice.reason
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
                steps=SchedulerLimits(max_batched_tokens=budget, max_running=running, max_chunk_tokens=chunk),
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


def _oracle(name: str) -> Oracle:
    reference = build_model(name)
    reference.set_attn_implementation("eager")
    return Oracle(name, build_model(name), reference)


@pytest.fixture(scope="module", params=[*PACKED, *PER_SEQUENCE])
def architecture(request: pytest.FixtureRequest) -> Oracle:
    """Every architecture in turn; built once for all tests of a module."""
    return _oracle(request.param)


@pytest.fixture
def oracle(architecture: Oracle) -> Iterator[Oracle]:
    """The architecture, its engines stopped at the end of the test."""
    yield architecture
    architecture.stop()


@pytest.fixture(scope="session")
def llama() -> Callable[[], Oracle]:
    """One architecture for tests that are not about architectures."""
    return lambda: _oracle("llama")
