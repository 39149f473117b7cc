"""Weights of 8 and 4 bits: what they stand for, that layers answer it, and that a broken operator never serves."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.architectures import build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.cpu_paged import CpuPagedAttention
from tengserve_backend.execution.fusion import fuse
from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators
from tengserve_backend.execution.fusion.quantized import (
    GROUP,
    Int8Weight,
    Quantization,
    product,
    to_int4,
    to_int8,
)
from tengserve_backend.native.load import cpu_library
from tengserve_backend.native.operators import fused_operators

QUANTIZED = (Quantization.INT8, Quantization.INT4)
ALL = slice(None)


def quantizing(quantization: Quantization) -> CpuDevice:
    kernels_device()
    return CpuDevice(cpu_library(), quantization=quantization)


@torch.inference_mode()
def logits(model, first=2):
    return model(input_ids=torch.arange(first, first + 20).unsqueeze(0), use_cache=False).logits.float()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 999))
def test_a_number_is_off_by_half_a_step_and_a_rounded_scale_at_most(rows: int, size: int, spread: float, seed: int):
    weight = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    groups = torch.cat([weight, weight[:, -1:].expand(-1, -size % GROUP)], 1).unflatten(1, (-1, GROUP))
    largest, span = groups.abs().amax(2), groups.amax(2) - groups.amin(2)
    for quantize, step in ((to_int8, largest / 127), (to_int4, span / 15)):
        found = quantize(weight).numbers(ALL, torch.float32)
        # bfloat16 keeps 8 bits: of the scale, at the farthest integer, and of the minimum.
        bound = 0.5 * step + 2**-8 * (largest + span) + 1e-9
        assert ((found - weight).abs() <= bound.repeat_interleave(GROUP, 1)[:, :size]).all()


def test_numbers_that_fit_stay():
    assert torch.equal(to_int8(torch.zeros(1, 64)).numbers(ALL, torch.float32), torch.zeros(1, 64))
    integers = torch.arange(-127, 129, 8).float()[None] / 8
    assert torch.equal(to_int8(integers).numbers(ALL, torch.float32), integers)
    sixteen = (torch.arange(64) % 16 * 0.25 - 2)[None].bfloat16()
    assert torch.equal(to_int4(sixteen).numbers(ALL, torch.bfloat16), sixteen.float())
    alike = torch.full((2, 40), 0.375)
    assert torch.equal(to_int4(alike).numbers(ALL, torch.float32), alike)


def with_numbers(model, quantization: Quantization):
    """A copy whose plain layers have what the integers stand for as weights."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if type(module) is torch.nn.Linear:
            quantize = to_int4 if quantization is Quantization.INT4 and module is not copied.lm_head else to_int8
            numbers = quantize(module.weight).numbers(ALL, module.weight.dtype).to(module.weight.dtype)
            module.weight = torch.nn.Parameter(numbers, requires_grad=False)
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_a_model_answers_what_its_integers_stand_for(name, quantization, dtype):
    model = build_model(name).to(dtype)
    expected = logits(with_numbers(model, quantization))
    assert not torch.allclose(expected, logits(model), rtol=1e-3, atol=1e-3)
    assert quantizing(quantization).fuse(model, ())["packed_linear"]
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    share = (logits(model) - expected).abs().max() / expected.abs().max()
    assert share <= {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_linear_layers_by_another_name_are_quantized_too(name, quantization):
    model = build_model(name)
    weights = sum(parameter.numel() for parameter in model.parameters())
    expected = logits(model)
    quantizing(quantization).fuse(model, ())
    assert sum(parameter.numel() for parameter in model.parameters()) < weights / 4
    share = (logits(model) - expected).norm() / expected.norm()
    # It is not the same, and not another one either.
    assert 1e-4 < share < 0.5


@pytest.mark.parametrize(("quantization", "share"), [(Quantization.INT8, 34 / 64), (Quantization.INT4, 20 / 64)])
def test_memory_is_what_the_bits_say(quantization, share):
    kernels_device()
    operators = fused_operators(CpuPagedAttention(), quantization)
    sizes = {"packed_linear": 0, "packed_head": 0}

    def counted(name: str) -> PackedLinearOperators:
        own = getattr(operators, name)

        def pack(weight):
            packed = own.pack(weight)
            sizes[name] += packed.untyped_storage().nbytes()
            return packed

        return dataclasses.replace(own, pack=pack)

    model = build_model("qwen2").bfloat16()
    head = model.lm_head.weight.shape
    weights = [module.weight for module in model.modules() if type(module) is torch.nn.Linear]
    layers = sum(weight.nbytes for weight in weights if weight is not model.lm_head.weight)
    outputs = sum(len(weight) for weight in weights if weight is not model.lm_head.weight)
    fuse(model, dataclasses.replace(operators, **{name: counted(name) for name in sizes}))
    # A factor for each output, and for each of whole panels of 32 outputs; the head has 8 bits in either case.
    assert sizes["packed_linear"] == layers * share + 4 * outputs
    assert sizes["packed_head"] == -(-head[0] // 32) * 32 * (head[1] * 34 // 32 + 4)
    assert sum(parameter.nbytes for parameter in model.parameters()) < layers / 2


def quantizing_by(linear) -> FusedOperators:
    def pack(weight: Int8Weight) -> torch.Tensor:
        return weight.numbers(ALL, torch.float32)

    return FusedOperators(lambda _: False, packed_linear=PackedLinearOperators(pack, linear, quantize=to_int8))


def test_a_broken_operator_is_an_error_and_no_layer_stays_as_it_was():
    def right(x, weight, bias, in_features, out_features):
        # Row by row: torch's bits depend on how many there are.
        return torch.stack([torch.nn.functional.linear(row, weight, bias) for row in x.flatten(0, -2)]).view(
            *x.shape[:-1], out_features
        )

    def one_column_wrong(x, weight, bias, in_features, out_features):
        weight = weight.clone()
        weight[0, :32] = 0
        return right(x, weight, bias, in_features, out_features)

    def by_company(x, weight, bias, in_features, out_features):
        return right(x, weight, bias, in_features, out_features) * (1 + 1e-6 * (len(x) < 5))

    def failing(*_):
        raise RuntimeError("not this one")

    assert fuse(build_model("llama"), quantizing_by(right)) == {"packed_linear": 29}
    for linear in (one_column_wrong, by_company, failing):
        with pytest.raises(ConfigurationError, match=r"cannot be quantized.*set quantization to none"):
            fuse(build_model("llama"), quantizing_by(linear))


@pytest.mark.parametrize("quantization", list(Quantization))
def test_a_layer_of_zeros_is_one_like_the_others(quantization):
    """As in a model that was made longer by layers that add nothing yet."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    device = quantizing(quantization)
    assert device.fuse(model, ()) == device.fuse(build_model("llama"), ())


def test_the_plain_product_is_what_the_numbers_give():
    weight, bias, x = torch.randn(5000, 40), torch.randn(5000), torch.randn(3, 40)
    for quantized in (to_int8(weight), to_int4(weight)):
        expected = torch.nn.functional.linear(x, quantized.numbers(ALL, torch.float32), bias)
        assert torch.allclose(product(x, quantized, bias), expected, atol=1e-5)


class EmbeddingAlone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)

    def forward(self, input_ids, use_cache):
        return self.embedding(input_ids)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConfigurationError, match="no plain linear layers"):
        quantizing(Quantization.INT4).fuse(EmbeddingAlone(), ())


def test_a_dtype_that_the_kernels_lack_is_refused():
    device = quantizing(Quantization.INT8)
    device.check_dtype(torch.bfloat16)
    with pytest.raises(ConfigurationError, match="quantization is 'int8', which needs dtype auto, float32 or bfloat16"):
        device.check_dtype(torch.float16)
