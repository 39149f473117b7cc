"""Linear layers over packed weights: the same answers, one copy of each weight, and left where that would be wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from concurrent.futures import Future

import pytest
import torch

from support.architectures import build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.execution.fusion import fuse, fuse_in_pieces
from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators
from tengserve_backend.native.load import CpuLibrary


@torch.inference_mode()
def logits(model, first=2):
    return model(input_ids=torch.arange(first, first + 20).unsqueeze(0), use_cache=False).logits


def packed_by(pack=lambda weight: weight.clone(), linear=None) -> FusedOperators:
    """Operators that keep the weight as it is."""

    def plain(x, weight, bias, in_features, out_features):
        assert weight.shape == (out_features, in_features)
        return torch.nn.functional.linear(x, weight, bias)

    return FusedOperators(lambda _: False, packed_linear=PackedLinearOperators(pack, linear or plain))


def test_every_layer_is_replaced_and_answers_as_before():
    model = build_model("qwen2")
    expected = logits(model)
    # Four layers of seven, and the head.
    assert fuse(model, packed_by()) == {"packed_linear": 29}
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert torch.allclose(logits(model), expected, atol=1e-5)


def test_queries_keys_and_values_are_one_product():
    products = []

    def linear(x, weight, bias, in_features, out_features):
        products.append(out_features)
        return torch.nn.functional.linear(x, weight, bias)

    model = build_model("llama")
    fuse(model, packed_by(linear=linear))
    products.clear()
    logits(model)
    # Queries, keys and values; back; gate and up; down. Then the head.
    assert products == [64 + 32 + 32, 64, 96 + 96, 64] * 4 + [199]


def test_each_part_answers_its_own_input_in_any_order():
    model = build_model("llama")
    attention = model.model.layers[0].self_attn
    x, y = torch.randn(1, 3, 64), torch.randn(1, 5, 64)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = [[layer(each) for layer in layers] for each in (x, y)]
    fuse(model, packed_by())
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    for order in ([(2, 0), (0, 1), (2, 1)], [(1, 0), (1, 0), (0, 0)], [(0, 1), (1, 0), (2, 1)]):
        for part, which in order:
            assert torch.allclose(parts[part]((x, y)[which]), expected[which][part], atol=1e-6)


def test_weights_exist_once():
    model = build_model("llama")
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is torch.nn.Linear]
    most = []

    def pack(weight):
        gc.collect()
        most.append(sum(ref() is not None for ref in weights))
        return weight.clone()

    fuse(model, packed_by(pack))
    gc.collect()
    assert not any(ref() is not None for ref in weights)
    # They go one by one, not all together at the end.
    assert most[-1] <= 2


def test_a_tied_embedding_stays_and_its_price_is_told(caplog):
    model = build_model("llama-tied")
    expected = logits(model)
    with caplog.at_level(logging.INFO):
        fuse(model, packed_by())
    assert "the embedding is the head's weight too" in caplog.text
    assert model.get_input_embeddings().weight.shape == (199, 64)
    assert torch.allclose(logits(model), expected, atol=1e-5)


def test_a_layer_whose_weight_other_code_reads_is_left(caplog):
    model = build_model("llama")
    reading = model.model.layers[1].mlp
    own = type(reading).forward

    def forward(self, x):
        return own(self, x) + 0 * self.down_proj.weight.sum()

    reading.__class__ = type("ReadingMlp", (type(reading),), {"forward": forward})
    expected = logits(model)
    with caplog.at_level(logging.INFO):
        assert fuse(model, packed_by()) == {"packed_linear": 28}
    assert "other code reads its weight" in caplog.text
    assert type(reading.down_proj) is torch.nn.Linear
    assert torch.allclose(logits(model), expected, atol=1e-5)


def test_what_disagrees_or_fails_is_left(caplog):
    def wrong(x, weight, bias, in_features, out_features):
        return 2 * torch.nn.functional.linear(x, weight, bias)

    def failing(weight):
        raise RuntimeError("not this one")

    for operators in (packed_by(linear=wrong), packed_by(failing)):
        model = build_model("llama")
        expected = logits(model)
        assert fuse(model, operators) == {}
        assert torch.equal(logits(model), expected)


def test_a_model_can_run_after_every_piece():
    model = build_model("llama")
    expected = logits(model)
    pieces = 0
    for _ in fuse_in_pieces(model, packed_by(), run=lambda: logits(model)):
        pieces += 1
        if pieces % 6 == 0:
            assert torch.allclose(logits(model), expected, atol=1e-5)
    assert pieces == 29


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma3", "phi3"])
def test_the_kernels_fuse_real_architectures(name, dtype):
    model = build_model(name).to(dtype)
    expected = logits(model).float()
    done = kernels_device().fuse(model, ())
    assert done["packed_linear"]
    share = (logits(model).float() - expected).abs().max() / expected.abs().max()
    assert share <= {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "phi3"])
def test_without_kernels_onednn_packs_the_layers(name, dtype):
    nothing: Future[CpuLibrary | None] = Future()
    nothing.set_result(None)
    model = build_model(name).to(dtype)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is torch.nn.Linear]
    expected = logits(model).float()
    device = CpuDevice(nothing)
    assert [tier.name for tier in device.attention_tiers((), dtype)] == ["portable"]
    done = device.fuse(model, ())
    assert list(done) == ["packed_linear"]
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    share = (logits(model).float() - expected).abs().max() / expected.abs().max()
    assert share <= {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    gc.collect()
    # The tied head's weight is the embedding's.
    assert sum(ref() is not None for ref in weights) == (name == "llama-tied")
