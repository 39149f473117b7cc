"""How many tokens the KV cache of a CPU holds: what is of use, a moderate default, or what the operator says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import build_tiny_model
from tengserve_backend.engine.load import load_engine
from tengserve_backend.repository.settings import MemoryBudget, ModelSettings
from tengserve_backend.repository.source import ModelSource

SETTINGS = dataclasses.replace(ModelSettings(), device="cpu", cpu_kernels="off")


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"max_seq_len": 256, "max_batch_size": 4}, 4 * 256),
        ({"max_seq_len": 1000, "max_batch_size": 32}, 16384),
        ({"max_seq_len": 10000, "max_batch_size": 32}, 2 * 10000),
        ({"max_seq_len": 10000, "max_batch_size": 1}, 10000),
        ({"max_seq_len": 1000, "max_batch_size": 32, "kv_cache_memory": MemoryBudget(bytes=2**30)}, 32 * 1008),
        ({"max_seq_len": 1000, "max_batch_size": 32, "kv_cache_memory": MemoryBudget(fraction=0.5)}, 32 * 1008),
    ],
    ids=["whole-batch", "default", "two-sequences", "one-sequence", "size", "fraction"],
)
def test_the_cache_holds(tmp_path: Path, changes: Mapping[str, Any], tokens: int) -> None:
    folder = build_tiny_model(tmp_path, "llama", seed=1, max_position_embeddings=16384)
    source = ModelSource("tiny", "1", folder, dataclasses.replace(SETTINGS, **changes))
    engine = load_engine(source, folder, lambda stage, fraction: None)
    try:
        assert engine.status().total_blocks * 16 == tokens
    finally:
        engine.stop()
