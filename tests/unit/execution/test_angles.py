"""Angles that are looked up are those that the model's module computes, to the bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from support.architectures import build_model
from tengserve_backend.execution.fusion.angles import AngleLookup
from tengserve_backend.execution.packed_batch import PackedBatch, pack
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.scheduling.step import ScheduledSequence, Step

DTYPES = (torch.float32, torch.bfloat16)


def batch_of(*parts: tuple[int, int]) -> PackedBatch:
    """Of sequences that compute so many tokens from a position on."""
    snapshot = Snapshot()
    sequences = [
        ScheduledSequence(number, start, (1,) * count, tuple(range(1 + (start + count) // 16)), samples=True)
        for number, (start, count) in enumerate(parts)
    ]
    step = Step(0, tuple(sequences))
    return pack(step, snapshot, block_size=16).on(snapshot.upload(lambda host: host))


def looked_up(module: Any, dtype: torch.dtype, positions: int) -> tuple[AngleLookup, Mock]:
    counted = Mock(wraps=module)
    counted.rope_type = module.rope_type
    lookup = AngleLookup(counted, torch.zeros(1, 1, 8, dtype=dtype), positions)
    counted.reset_mock()
    return lookup, counted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "smollm3"])
@torch.inference_mode()
def test_they_are_the_modules_own(name: str, dtype: torch.dtype) -> None:
    module = build_model(name).model.rotary_emb
    lookup, counted = looked_up(module, dtype, 500)
    for parts in [((0, 1),), ((7, 93), (499, 1), (0, 1)), ((0, 500),), ((499, 1),)]:
        batch = batch_of(*parts)
        hidden = torch.zeros(1, batch.input_ids.shape[1], 8, dtype=dtype)
        expected = module(hidden, position_ids=batch.position_ids)
        assert all(torch.equal(a, b) for a, b in zip(lookup(hidden, batch), expected, strict=True))
    assert counted.call_count == 0


@torch.inference_mode()
def test_positions_beyond_are_computed() -> None:
    lookup, counted = looked_up(build_model("llama").model.rotary_emb, torch.float32, 500)
    batch = batch_of((3, 1), (500, 1))
    lookup(torch.zeros(1, 2, 8), batch)
    assert counted.call_count == 1


@torch.inference_mode()
def test_a_table_is_no_larger_than_a_few_megabytes() -> None:
    lookup, counted = looked_up(build_model("llama").model.rotary_emb, torch.float32, 10**9)
    lookup(torch.zeros(1, 1, 8), batch_of((10**6, 1)))
    assert counted.call_count == 1


@torch.inference_mode()
def test_angles_that_follow_from_more_than_the_position_are_computed() -> None:
    lookup, counted = looked_up(build_model("llama-dynamic-rope").model.rotary_emb, torch.float32, 500)
    lookup(torch.zeros(1, 1, 8), batch_of((3, 1)))
    assert counted.call_count == 1


@torch.inference_mode()
def test_a_module_that_answers_by_the_order_of_its_positions_is_asked_each_time() -> None:
    own = build_model("llama").model.rotary_emb

    def angles(hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return own(hidden, position_ids=position_ids - position_ids[:, :1])

    angles.rope_type = "default"
    lookup, counted = looked_up(angles, torch.float32, 500)
    lookup(torch.zeros(1, 1, 8), batch_of((3, 1)))
    assert counted.call_count == 1
