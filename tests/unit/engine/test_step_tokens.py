"""How many tokens a step computes: the device's own numbers, or the operator's one."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from support.tiny_model import build_tiny_model
from tengserve_backend.engine.load import load_engine
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource

SETTINGS = dataclasses.replace(ModelSettings(), device="cpu", cpu_kernels="off", max_seq_len=64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "steps of up to 256 tokens, 64 of prompts beside streams"),
        ({"max_batched_tokens": 48}, "steps of up to 48 tokens, 48 of prompts beside streams"),
        ({"max_batch_size": 300}, "steps of up to 300 tokens, 64 of prompts beside streams"),
    ],
)
def test_the_log_tells_them(tmp_path, caplog, changes, said):
    folder = build_tiny_model(tmp_path, "llama", seed=1)
    source = ModelSource("tiny", "1", folder, dataclasses.replace(SETTINGS, **changes))
    with caplog.at_level(logging.INFO, logger="tengserve_backend.engine.summary"):
        load_engine(source, folder, lambda stage, fraction: None).stop()
    assert said in caplog.text
