"""Engines over tiny random models, and what transformers itself answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_model import ARCHITECTURES, build_tiny_model
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.assembly import Capacity, assemble
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.execution.loader import load_config, load_model
from tengserve_backend.execution.selfcheck import check_packed_forward
from tengserve_backend.generation import ModelLimits
from tengserve_backend.scheduling.scheduler import SchedulerLimits
from tengserve_backend.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session", params=ARCHITECTURES)
def weights_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def reference(weights_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights_dir, dtype=torch.float32, attn_implementation="eager").eval()
    # Answers of a fixed length are compared, so EOS is a token like any other on both sides.
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def start_engine(weights_dir: Path):
    """Start engines with a step size and a cache size of choice; they are stopped at the end."""
    engines: list[NativeEngine] = []
    device = CpuDevice()

    def start(*, budget: int = 128, chunk: int = 128, running: int = 8, blocks: int = 512) -> NativeEngine:
        config = load_config(weights_dir)
        model = load_model(weights_dir, config, dtype=torch.float32, device=device.torch_device)
        tier = device.attention_tier()
        check_packed_forward(model, tier, vocab_size=config.vocab_size, device=device.torch_device, dtype=torch.float32)
        engine = assemble(
            model=model,
            info=ModelInfo(
                name="tiny",
                version="1",
                architecture=type(model).__name__,
                vocab_size=config.vocab_size,
                limits=ModelLimits(max_seq_len=1024, max_input_len=1000, max_iter_times=512),
                full_text_enabled=False,
                device="cpu",
                dtype="float32",
                attention_tier=tier.name,
            ),
            defaults=ModelDefaults(top_k=0, eos_ids=frozenset()),
            tokenizer=load_tokenizer(weights_dir),
            device=device,
            tier=tier,
            dtype=torch.float32,
            capacity=Capacity(
                steps=SchedulerLimits(max_batched_tokens=budget, max_running=running, max_chunk_tokens=chunk),
                total_blocks=blocks,
                max_waiting_requests=64,
                max_waiting_tokens=100_000,
            ),
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def greedy(reference: Any) -> Callable[[list[int], int], list[int]]:
    """What transformers' generate answers, alone."""

    def generate(prompt: list[int], count: int) -> list[int]:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
        )
        return out[0, len(prompt) :].tolist()

    return generate
