"""Fused operators in real models, over the operators' reference functions."""

from __future__ import annotations

import copy
import logging
import sys

import pytest
import torch

from support.architectures import PACKED, build_model
from support.npu_operators import npu_operators
from support.npu_reference import REFERENCES, references_for
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion import FUSIONS, fuse
from tengserve_backend.devices.npu.operators import capabilities

EVERYTHING = tuple(FUSIONS)
# Share of the largest logit; a fused half precision model rounds less often.
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def fused(model, *wanted, family=NpuFamily.ATLAS_A2):
    return fuse(model, wanted=wanted or EVERYTHING, family=family, found=capabilities())


@torch.inference_mode()
def logits(model):
    ids = torch.arange(2, 42).unsqueeze(0)
    return model(input_ids=ids, use_cache=False).logits.float()


def off_by(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", PACKED)
def test_every_architecture_answers_as_before(npu, name):
    model = build_model(name)
    expected = logits(model)
    fused(model)
    assert off_by(logits(model), expected) <= BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_half_precision_answers_as_before(npu, name, dtype):
    model = build_model(name).to(dtype)
    expected = logits(model)
    assert len(fused(model)) == 3
    assert off_by(logits(model), expected) <= BOUND[dtype]


@pytest.mark.parametrize(
    ("name", "done"),
    [
        ("llama", {"rms_norm": 9, "rotary": 1, "swiglu": 4}),
        # Norms of queries and keys too.
        ("qwen3", {"rms_norm": 17, "rotary": 1, "swiglu": 4}),
        # Gate and up projection are one already; partly rotated heads are sliced inside the function.
        ("phi3", {"rms_norm": 9, "rotary": 1, "swiglu": 4}),
        ("qwen2", {"rms_norm": 9, "rotary": 1, "swiglu": 4}),
        ("gpt2", {}),
    ],
)
def test_what_is_fused_is_told(npu, name, done):
    assert fused(build_model(name)) == done


def test_norms_that_add_one_to_their_weight_are_left_and_named(npu, caplog):
    model = build_model("gemma3")
    with caplog.at_level(logging.INFO):
        assert fused(model) == {"rotary": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rms_norm is left to transformers in ")
    assert "Gemma3RMSNorm: the answers differ by" in line


def test_interleaved_rotary_embeddings_are_left(npu, caplog):
    with caplog.at_level(logging.INFO):
        done = fused(build_model("cohere2"))
    assert "rotary" not in done
    assert "apply_rotary_pos_emb: the answers differ by" in caplog.text


def test_other_activations_are_left(npu):
    model = build_model("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    expected = logits(model)
    assert fused(model, "swiglu") == {}
    assert torch.equal(logits(model), expected)


def test_quantized_layers_are_left(npu):
    class Quantized(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).round()

    model = build_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.__class__ = Quantized
    assert fused(model, "swiglu") == {"swiglu": 3}
    assert model.model.layers[0].mlp is mlp


def test_an_mlp_that_disagrees_still_works(npu, caplog):
    model = build_model("llama")

    class Odd(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) * 2

    model.model.layers[1].mlp.__class__ = Odd
    expected = logits(model)
    with caplog.at_level(logging.INFO):
        assert fused(model, "swiglu") == {"swiglu": 3}
    assert "Odd: the answers differ by" in caplog.text
    assert off_by(logits(model), expected) <= BOUND[torch.float32]


def test_a_part_that_fails_on_random_input_is_left(npu, caplog):
    model = build_model("llama")

    class PickyRMSNorm(type(model.model.norm)):
        def forward(self, x):
            if x.shape[0] == 2:
                raise ValueError("not this one")
            return super().forward(x)

    model.model.norm.__class__ = PickyRMSNorm
    with caplog.at_level(logging.INFO):
        assert fused(model, "rms_norm") == {"rms_norm": 8}
    assert "PickyRMSNorm: it fails with ValueError on random input" in caplog.text


def test_merged_projections_exist_once(npu):
    model = build_model("llama")
    mlp = model.model.layers[0].mlp
    before = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    gate = mlp.gate_proj.weight
    fused(model)
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == before
    merged = model.model.layers[0].mlp.gate_up_proj.weight
    assert gate.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()


def test_each_fusion_can_be_left_out(npu):
    for name in EVERYTHING:
        done = fused(build_model("llama"), *(set(EVERYTHING) - {name}))
        assert len(done) == 2
        assert name not in done
    assert fuse(build_model("llama"), wanted=(), family=NpuFamily.ATLAS_A2, found=capabilities()) == {}


def counted(calls):
    def rotary(*args, **kwargs):
        calls.append(1)
        return REFERENCES["npu::npu_rotary_mul"](*args, **kwargs)

    return {**REFERENCES, "npu::npu_rotary_mul": rotary}


def test_another_model_of_the_family_is_untouched():
    calls = []
    with npu_operators(counted(calls)):
        one, other = build_model("llama"), build_model("llama")
        fused(one, "rotary")
        calls.clear()
        expected = logits(other)
        assert calls == []
        assert off_by(logits(one), expected) <= BOUND[torch.float32]
        assert len(calls) == 8
        # Fusing the second later must find the original behind the switch.
        assert fused(other, "rotary") == {"rotary": 1}
        calls.clear()
        logits(other)
        assert len(calls) == 8


def test_a_call_in_another_way_goes_to_the_models_own_function():
    calls = []
    with npu_operators(counted(calls)):
        model = build_model("llama")
        fused(model, "rotary")
        rotate = sys.modules[type(model).__module__].apply_rotary_pos_emb
        q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
        cos, sin = torch.randn(2, 1, 5, 16)
        answers = []

        def layers(*_, **__):
            answers.append(rotate(q, k, cos, sin))
            answers.append(rotate(q, k, cos=cos, sin=sin))
            answers.append(rotate(q, k, cos, sin, unsqueeze_dim=1))
            raise StopIteration

        calls.clear()
        model.model.forward = layers
        with pytest.raises(StopIteration):
            model(input_ids=torch.ones(1, 2, dtype=torch.long))
    assert len(calls) == 2
    for answer in answers[1:]:
        assert all(torch.allclose(got, own) for got, own in zip(answers[0], answer, strict=True))


def test_a_forward_that_fails_does_not_leave_the_switch_on():
    calls = []
    with npu_operators(counted(calls)):
        one, other = build_model("llama"), build_model("llama")
        fused(one, "rotary")
        with pytest.raises(TypeError):
            one(input_ids=object())
        calls.clear()
        logits(other)
        assert calls == []


def test_310p_gets_what_it_has():
    with npu_operators(references_for("Ascend310P3")):
        done = fused(build_model("llama").half(), family=NpuFamily.ASCEND_310P)
    assert done == {"rms_norm": 9, "swiglu": 4}


def test_a_chip_or_a_torch_npu_without_the_operator_says_so(npu, caplog):
    with caplog.at_level(logging.INFO):
        assert fused(build_model("llama"), family=NpuFamily.OTHER) == {}
        assert "rotary is left to transformers: another Ascend chip is not known to have it" in caplog.text


def test_without_torch_npu_nothing_is_fused(caplog):
    with caplog.at_level(logging.INFO):
        assert fused(build_model("llama")) == {}
    assert "swiglu is left to transformers: torch-npu has no such operator" in caplog.text


def test_a_copy_of_a_fused_model_works(npu):
    model = build_model("llama")
    fused(model, "rms_norm", "swiglu")
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
