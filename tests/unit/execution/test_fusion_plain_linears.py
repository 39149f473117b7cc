"""Layers that are linear without saying so: GPT-2's Conv1D and the experts of mixture models are packed too."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from support.architectures import build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.execution.fusion import fuse
from tengserve_backend.execution.fusion.experts import LinearExperts
from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators

MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


@torch.inference_mode()
def logits(model, first=2, count=20):
    return model(input_ids=torch.arange(first, first + count).unsqueeze(0), use_cache=False).logits


def plain() -> FusedOperators:
    """Operators that keep the weight as it is."""
    return FusedOperators(
        lambda _: False,
        packed_linear=PackedLinearOperators(
            lambda weight: weight.clone(), lambda x, weight, bias, *_: torch.nn.functional.linear(x, weight, bias)
        ),
    )


def classes(model) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def test_conv1d_is_packed():
    model = build_model("gpt2")
    expected = logits(model)
    weights = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, Conv1D)]
    # Four layers of four, and the head.
    assert fuse(model, plain()) == {"conv1d": 16, "packed_linear": 17}
    assert classes(model).isdisjoint({"Conv1D", "Linear"})
    assert torch.allclose(logits(model), expected, atol=1e-5)
    gc.collect()
    assert [weight() for weight in weights] == [None] * 16


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_packed(name):
    model = build_model(name)
    expected = logits(model)
    weights = [
        weakref.ref(parameter)
        for name, parameter in model.named_parameters()
        if "experts" in name and "shared" not in name
    ]
    done = fuse(model, plain())
    assert done["experts"] == (3 if name == "deepseek_v3" else 4)
    assert "Linear" not in classes(model)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    gc.collect()
    assert [weight() for weight in weights if weight() is not None] == []


def test_experts_that_disagree_are_left_with_their_weights(caplog):
    model = build_model("mixtral")
    expected = logits(model)
    experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    # Another gate than the one that it computes with: what else could be wrong looks the same from here.
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0]
    model.set_experts_implementation("eager")
    with caplog.at_level(logging.INFO):
        assert fuse(model, plain())["experts"] == 3
    assert "experts is left to transformers in 1 of MixtralExperts: the answers differ by" in caplog.text
    assert torch.allclose(logits(model), expected, atol=1e-5)


def test_without_packed_layers_nothing_changes():
    for name in ("gpt2", "mixtral"):
        assert fuse(build_model(name), FusedOperators(lambda _: False)) == {}


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_layers_in_a_format_that_is_not_packed_stay_as_they_are(name):
    model = build_model(name).half()
    before = classes(model)
    done = fuse(model, plain())
    assert {"conv1d", "experts"}.isdisjoint(done)
    assert before & {"Conv1D", "MixtralExperts"} <= classes(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", *MIXTURES])
def test_the_kernels_pack_them(name, dtype):
    model = build_model(name).to(dtype)
    expected = logits(model).float()
    done = kernels_device().fuse(model, ())
    assert done["conv1d" if name == "gpt2" else "experts"]
    assert done["packed_linear"]
    share = (logits(model).float() - expected).abs().max() / expected.abs().max()
    assert share <= {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_gets_the_same_bits_whoever_is_beside_it(dtype):
    model = build_model("qwen3_moe").to(dtype)
    kernels_device().fuse(model, ())
    experts = next(module for module in model.modules() if isinstance(module, LinearExperts))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(33, 64, generator=generator).to(dtype)
    routed = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(33)])
    weights = torch.rand(33, 2, generator=generator).to(dtype)
    together = experts(x, routed, weights)
    for count in (1, 2, 9, 20):
        assert torch.equal(experts(x[:count], routed[:count], weights[:count]), together[:count])
    alone = torch.cat([experts(x[i : i + 1], routed[i : i + 1], weights[i : i + 1]) for i in range(33)])
    assert torch.equal(alone, together)
