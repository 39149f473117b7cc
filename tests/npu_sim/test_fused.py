"""Our fused attention and fused operators on the simulated device, through the real torch_npu."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from npu_sim.simulator.log import record
from npu_sim.simulator.process import run_simulated
from npu_sim.simulator.state import State
from support.architectures import PACKED, build_model
from tengserve_backend.devices.npu.device import NpuDevice
from tengserve_backend.devices.npu.operators import Operator, capabilities
from tengserve_backend.devices.npu.paged_attention import FusedPagedAttention
from tengserve_backend.execution.attention.check import attention_errors
from tengserve_backend.execution.attention.registry import IMPLEMENTATION, StepContext, step_context
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.execution.kv_tensors import PagedKVCache
from tengserve_backend.execution.packed_batch import pack
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.repository.settings import NPU_FUSIONS
from tengserve_backend.scheduling.step import ScheduledSequence, Step

NEEDS = (
    AttentionNeeds(query_heads=8, kv_heads=2, key_dim=128, value_dim=128),
    AttentionNeeds(query_heads=4, kv_heads=4, key_dim=64, value_dim=64, window=4096),
)
# One rounding of the answer, and the portable oracle sums in another order.
BOUND = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    return NpuDevice(0)


def test_the_wheel_has_every_operator_that_we_use(npu: State) -> None:
    assert capabilities().available == set(Operator)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_fused_attention_equals_the_portable_one_on_the_host(npu: State, device: NpuDevice, dtype: torch.dtype) -> None:
    tiers = device.attention_tiers(NEEDS, dtype)
    assert [tier.name for tier in tiers] == ["npu-fused", "portable"]
    errors = attention_errors(tiers[0], NEEDS, dtype=dtype, device=device.torch_device, upload=device.upload)
    assert max(error.share for error in errors) <= BOUND[dtype]
    assert npu.fallbacks == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "glm4", "gemma3"])
def test_a_fused_model_answers_as_the_plain_one_on_the_device(
    npu: State, device: NpuDevice, name: str, dtype: torch.dtype
) -> None:
    model = build_model(name).to(device.torch_device, dtype)
    ids = torch.arange(2, 22).unsqueeze(0).npu()
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.cpu().float()
        done = device.fuse(model, NPU_FUSIONS)
        assert done
        npu.reset_counters()
        with record() as log:
            logits = model(input_ids=ids, use_cache=False).logits
        assert log.fallbacks.total() == 0
        assert {f"npu::npu_{part}".replace("rotary", "rotary_mul") for part in done} <= set(log.native)
    share = float((logits.cpu().float() - expected).abs().max() / expected.abs().max())
    assert share <= (1e-4 if dtype is torch.float32 else 1e-2)


def _called(native: Collection[str]) -> set[str]:
    return {name.removeprefix("npu::") for name in native}


def test_no_check_of_a_call_waits_for_the_device(npu: State, device: NpuDevice) -> None:
    config = PACKED["qwen3"]()
    config.head_dim = 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().to(device.torch_device)
    assert len(device.fuse(model, NPU_FUSIONS)) == 3
    with torch.inference_mode():
        steps = _steps(model, FusedPagedAttention(device.torch_device), device)
        next(steps)
        npu.reset_counters()
        with record() as log:
            next(steps)
    assert log.host_reads.total() == 0
    assert npu.device_to_host == 0
    assert log.native["npu::npu_fused_infer_attention_score"] == 4
    assert log.native["npu::npu_scatter_pa_kv_cache"] == 4


def _steps(model: Any, tier: AttentionTier, device: NpuDevice) -> Iterator[torch.Tensor]:
    """Logits of a prompt, then of a decode behind it."""
    model.set_attn_implementation(IMPLEMENTATION)
    cache = PagedKVCache(total_blocks=2, block_size=tier.block_size, dtype=torch.float16, device=device.torch_device)
    for start, tokens in ((0, (5,) * 140), (140, (6,))):
        snapshot = Snapshot()
        part = ScheduledSequence(0, start, tokens, (1, 0), samples=True)
        layout = pack(Step(start, (part,)), snapshot, block_size=tier.block_size)
        batch = layout.on(snapshot.upload(device.upload))
        with step_context(StepContext(batch=batch, cache=cache, tier=tier, chunks={})):
            yield model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
            ).logits


# No transformers: importing it takes most of a process's time.
_ON_A_CHIP = """
    import torch
    from tengserve_backend.devices.npu.device import NpuDevice
    from tengserve_backend.execution.attention.check import find_attention_fault
    from tengserve_backend.execution.attention.tier import AttentionNeeds

    class RMSNorm(torch.nn.RMSNorm):
        def forward(self, x):
            return super().forward(x)

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(64, 64) for _ in range(3))
            self.act_fn = torch.nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    device = NpuDevice(0)
    needs = [AttentionNeeds(query_heads=4, kv_heads=2, key_dim=64, value_dim=64)]
    tiers = device.attention_tiers(needs, torch.float16)
    print(*(tier.name for tier in tiers))
    print(*(find_attention_fault(tier, needs, device, dtype=torch.float16) or "right" for tier in tiers))
    model = torch.nn.Sequential(RMSNorm(64, eps=1e-5), Mlp()).to(device.torch_device, torch.float16)
    print(*device.fuse(model, ("rms_norm", "rotary", "swiglu")))
    print(bool(model(torch.ones(2, 64, device="npu").half()).isfinite().all()))
"""


@pytest.mark.parametrize(
    ("soc", "tiers"),
    [("Ascend910B4", "npu-fused portable"), ("Ascend910_9392", "npu-fused portable"), ("Ascend310P3", "portable")],
)
def test_each_chip_gets_what_it_has(soc: str, tiers: str) -> None:
    lines = run_simulated(_ON_A_CHIP, NPU_SIM_SOC=soc).splitlines()
    assert lines[-4:] == [tiers, " ".join(["right"] * len(tiers.split())), "rms_norm swiglu", "True"]
