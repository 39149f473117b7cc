"""What a step costs on the simulated NPU: one copy up, one read, and no operator that falls back to the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_sim.simulator.log import record
from npu_sim.simulator.state import State
from support.tiny_model import build_tiny_model
from tengserve_backend.devices.select import select_device
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.execution.loader import load_config, load_model
from tengserve_backend.execution.runner import Runner
from tengserve_backend.generation.sampling import ResolvedSampling
from tengserve_backend.repository.settings import NPU_FUSIONS
from tengserve_backend.scheduling.step import ScheduledSequence, Step

_SEQUENCES, _PROMPT, _BLOCKS = 6, 140, 16

_GREEDY = {"do_sample": False}
_SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5}
_PENALIZED = {**_SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": ((7, -1.0),)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), config_overrides={"hidden_size": 256, "head_dim": 64})


def _resolved(sampling: dict[str, object]) -> ResolvedSampling:
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
    }
    return ResolvedSampling(**(neutral | sampling))


def _decode(number: int) -> Step:
    """Every sequence has one more token."""
    return Step(
        number,
        tuple(
            ScheduledSequence(index, _PROMPT + number, (5 + index,), _blocks(index), samples=True)
            for index in range(_SEQUENCES)
        ),
    )


def _prefill() -> Step:
    return Step(
        0,
        tuple(
            ScheduledSequence(index, 0, (5 + index,) * _PROMPT, _blocks(index), samples=True)
            for index in range(_SEQUENCES)
        ),
    )


def _blocks(index: int) -> tuple[int, ...]:
    return tuple(range(index * _BLOCKS, (index + 1) * _BLOCKS))


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
@pytest.mark.parametrize(
    ("portable", "dtype"),
    [(True, torch.float32), (False, torch.float16), (False, torch.bfloat16)],
    ids=["portable-float32", "fused-float16", "fused-bfloat16"],
)
def test_a_step_goes_up_once_comes_down_once_and_stays_on_the_device(
    npu: State, folder: Path, portable: bool, dtype: torch.dtype, mixed: bool
) -> None:
    device = select_device("npu")
    model = load_model(folder, load_config(folder), dtype=dtype, device=device.torch_device)
    if not portable:
        assert len(device.fuse(model, NPU_FUSIONS)) == len(NPU_FUSIONS)
    choice = choose_forward(model, device, vocab_size=320, dtype=dtype, portable=portable)
    forward = build_forward(choice, model, total_blocks=_SEQUENCES * _BLOCKS, device=device, dtype=dtype)
    assert forward.tier == ("portable" if portable else "npu-fused")
    runner = Runner(forward=forward, device=device, eos_ids=[2])
    kinds = [_GREEDY, _SAMPLED, _PENALIZED] if mixed else [_GREEDY]
    for index in range(_SEQUENCES):
        runner.admit(
            index,
            prompt_ids=(5 + index,) * _PROMPT,
            sampling=_resolved(kinds[index % len(kinds)]),
            min_new_tokens=4,
        )
    runner.run(_prefill())
    runner.run(_decode(0))
    npu.reset_counters()
    steps = 8
    with record() as log:
        for number in range(1, 1 + steps):
            assert None not in runner.run(_decode(number)).values()
    assert npu.host_to_device == steps
    assert npu.device_to_host == steps
    assert npu.fallbacks == 0, npu.last_fallback
    assert not log.fallbacks
    assert not log.host_reads
    assert npu.stub_calls == 0, npu.last_stub
    fused = {name for name in log.native if name.startswith("npu::")}
    assert ("npu::npu_fused_infer_attention_score" in fused) == (not portable)
    if not portable:
        layers = 4
        assert log.native["npu::npu_fused_infer_attention_score"] == layers * steps
        assert log.native["npu::npu_scatter_pa_kv_cache"] == layers * steps
        assert {"npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_swiglu"} <= fused
