"""Plain transformers on the simulated device gives the tokens that it gives on the host."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from npu_sim.simulator.state import State
from support.tiny_model import build_tiny_model

_PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11] * 20)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


def _tokens(folder: Path, device: str) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    found = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt]).to(device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_tokens_are_those_of_the_host(npu: State, tiny: Path) -> None:
    assert _tokens(tiny, "npu") == _tokens(tiny, "cpu")
    assert npu.fallbacks == 0
    assert npu.stub_calls == 0


def test_from_another_thread_too(npu: State, tiny: Path) -> None:
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(_tokens(tiny, "npu")))
    thread.start()
    thread.join()
    assert found == [_tokens(tiny, "cpu")]
