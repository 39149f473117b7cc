"""What our operators module checks before a call, what it passes, and what it finds in a torch-npu."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from support.npu_operators import SIGNATURES, npu_operators
from support.npu_reference import REFERENCES, references_for
from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.operators import Operator
from tengserve_backend.errors import OperatorError

HEADS, KV_HEADS, DIM, BLOCKS, SIZE = 4, 2, 64, 6, 128


def attention_call(**changes):
    """The arguments of a right call: a decode over 130 tokens and a prompt of 3."""
    half = torch.float16
    arguments = {
        "query": torch.randn(4, HEADS, DIM, dtype=half),
        "keys": torch.randn(BLOCKS, SIZE, KV_HEADS * DIM, dtype=half),
        "values": torch.randn(BLOCKS, SIZE, KV_HEADS * DIM, dtype=half),
        "mask": operators.causal_mask(torch.device("cpu")),
        "query_ends": [1, 4],
        "contexts": [130, 3],
        "block_table": torch.tensor([[5, 2], [1, 0]], dtype=torch.int32),
        "kv_heads": KV_HEADS,
        "scaling": 0.125,
        "window": None,
    }
    arguments.update(changes)
    query, keys, values = (arguments.pop(name) for name in ("query", "keys", "values"))
    return operators.attention(query, keys, values, **arguments)


def scatter_call(**changes):
    half = torch.float16
    arguments = {
        "key": torch.randn(3, KV_HEADS, DIM, dtype=half),
        "value": torch.randn(3, KV_HEADS, DIM, dtype=half),
        "key_cache": torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM, dtype=half),
        "value_cache": torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM, dtype=half),
        "slots": torch.tensor([3, 700, 5], dtype=torch.int32),
    }
    arguments.update(changes)
    slots = arguments.pop("slots")
    return operators.scatter_cache(*arguments.values(), slots=slots)


BROKEN_ATTENTION = {
    "dtype must be float16 or bfloat16, not float32": {"query": torch.zeros(4, HEADS, DIM)},
    "query must be [T, heads, dim], not [1, 4, 4, 64]": {"query": torch.zeros(1, 4, HEADS, DIM)},
    "head dim must be 64 or 128, not 80": {"query": torch.zeros(4, HEADS, 80).half()},
    "head dim must be 64 or 128, not 256": {"query": torch.zeros(4, HEADS, 256).half()},
    "heads must be at most 256, not 258": {"query": torch.zeros(4, 258, DIM).half()},
    "heads must be a multiple of the 2 of keys, at most 64 times as many, not 130": {
        "query": torch.zeros(4, 130, DIM).half()
    },
    "heads must be a multiple of the 2 of keys, at most 64 times as many, not 3": {
        "query": torch.zeros(4, 3, DIM).half()
    },
    "keys must be [blocks, block size, heads * dim], not [6, 128, 64]": {"keys": torch.zeros(6, 128, 64).half()},
    "values must be of the keys' shape [6, 128, 128], not [6, 128, 64]": {"values": torch.zeros(6, 128, 64).half()},
    "block size must be 128, 256, 384 or 512, not 16": {
        "keys": torch.zeros(6, 16, 128).half(),
        "values": torch.zeros(6, 16, 128).half(),
    },
    "keys.dtype must be torch.float16 as the query, not torch.bfloat16": {"keys": torch.zeros(6, 128, 128).bfloat16()},
    "values must be contiguous, not [128, 1, 768]": {"values": torch.zeros(128, 6, 128).half().permute(1, 2, 0)},
    "query must be contiguous, not [64, 256, 1]": {"query": torch.zeros(HEADS, 4, DIM).half().transpose(0, 1)},
    "mask must be [2048, 2048], not [1, 1, 1, 130]": {"mask": torch.zeros(1, 1, 1, 130, dtype=torch.bool)},
    "mask.dtype must be int8, uint8 or bool, not torch.float16": {"mask": torch.zeros(2048, 2048).half()},
    "window must be at least 1, not 0": {"window": 0},
    "query ends must be up to the 4 queries, not 3": {"query_ends": [1, 3]},
    "contexts must be one for each of 2 sequences, not 1": {"contexts": [130]},
    "queries of a sequence must be at least 1, not 0": {"query_ends": [4, 4]},
    "queries of a sequence must be at least 1, not -1": {"query_ends": [5, 4]},
    "context less its queries must be at least 0, not -1": {"contexts": [130, 2]},
    "block table must be [2, blocks], not [1, 2]": {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
    "block table must be wide enough for 130 tokens, not [2, 1]": {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    "block_table.dtype must be torch.int32, not torch.int64": {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
    "block table must be contiguous, not [1, 2]": {"block_table": torch.zeros(2, 2, dtype=torch.int32).T},
    "blocks must be at least the 2 of the longest sequence, not 1": {
        "keys": torch.zeros(1, SIZE, KV_HEADS * DIM).half(),
        "values": torch.zeros(1, SIZE, KV_HEADS * DIM).half(),
    },
    "context of a decode must be at most 262144, not 262145": {"contexts": [262145, 3]},
}


@pytest.mark.parametrize(("sentence", "changes"), BROKEN_ATTENTION.items(), ids=list(BROKEN_ATTENTION))
def test_attention_names_the_broken_rule_and_does_not_call(sentence, changes):
    # No operator is defined: a call would fail with another error.
    with pytest.raises(OperatorError) as caught:
        attention_call(**changes)
    assert caught.value.message == f"npu_fused_infer_attention_score: {sentence}"


BROKEN_SCATTER = {
    "key must be [T, heads, dim], not [3, 128]": {"key": torch.zeros(3, 128).half()},
    "value must be of the key's tokens and heads [3, 2], not [4, 2, 64]": {"value": torch.zeros(4, 2, 64).half()},
    "key cache must be [blocks, block size, heads, dim], not [768, 2, 64]": {
        "key_cache": torch.zeros(768, 2, 64).half()
    },
    "value cache must be of heads [2, 64], not [6, 128, 4, 64]": {"value_cache": torch.zeros(6, 128, 4, 64).half()},
    "value cache must be of the keys' blocks, not [5, 128, 2, 64]": {"value_cache": torch.zeros(5, 128, 2, 64).half()},
    "key.dtype must be torch.float16 as the cache, not torch.float32": {"key": torch.zeros(3, 2, 64)},
    "key must be contiguous, not [64, 192, 1]": {"key": torch.zeros(2, 3, 64).half().transpose(0, 1)},
    "slots must be [3], not [2]": {"slots": torch.zeros(2, dtype=torch.int32)},
    "slots.dtype must be int32 or int64, not torch.float32": {"slots": torch.zeros(3)},
    "slots must be contiguous, not [2]": {"slots": torch.zeros(6, dtype=torch.int32)[::2]},
}


@pytest.mark.parametrize(("sentence", "changes"), BROKEN_SCATTER.items(), ids=list(BROKEN_SCATTER))
def test_scatter_names_the_broken_rule_and_does_not_call(sentence, changes):
    with pytest.raises(OperatorError) as caught:
        scatter_call(**changes)
    assert caught.value.message == f"npu_scatter_pa_kv_cache: {sentence}"


BROKEN_OTHERS = {
    "npu_rms_norm: x must be a tensor of 2 to 8 dimensions, not [64]": lambda: operators.rms_norm(
        torch.zeros(64), torch.ones(64), epsilon=1e-6
    ),
    "npu_rms_norm: weight must be [64], not [32]": lambda: operators.rms_norm(
        torch.zeros(2, 64), torch.ones(32), epsilon=1e-6
    ),
    "npu_rms_norm: weight.dtype must be torch.float32 or torch.float32, not torch.float16": lambda: operators.rms_norm(
        torch.zeros(2, 64), torch.ones(64).half(), epsilon=1e-6
    ),
    "npu_rms_norm: bytes of a row must be at least 32, not 16": lambda: operators.rms_norm(
        torch.zeros(2, 8).half(), torch.ones(8).half(), epsilon=1e-6
    ),
    "npu_rotary_mul: x must be [batch, T, heads, dim], not [5, 2, 64]": lambda: operators.rotary(
        torch.zeros(5, 2, 64), torch.zeros(5, 1, 64), torch.zeros(5, 1, 64)
    ),
    "npu_rotary_mul: cos must be [1 or 1, 5, 1, 64], not [1, 5, 1, 32]": lambda: operators.rotary(
        torch.zeros(1, 5, 2, 64), torch.zeros(1, 5, 1, 32), torch.zeros(1, 5, 1, 32)
    ),
    "npu_rotary_mul: cos.dtype must be torch.float16, not torch.float32": lambda: operators.rotary(
        torch.zeros(1, 5, 2, 64).half(), torch.zeros(1, 5, 1, 64), torch.zeros(1, 5, 1, 64)
    ),
    "npu_rotary_mul: dim must be even and at most 894, not 896": lambda: operators.rotary(
        torch.zeros(1, 5, 2, 896), torch.zeros(1, 5, 1, 896), torch.zeros(1, 5, 1, 896)
    ),
    "npu_rotary_mul: batch and heads must be at most 999, not 1000": lambda: operators.rotary(
        torch.zeros(1, 2, 1000, 2), torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2)
    ),
    "npu_swiglu: size must be even, not 7": lambda: operators.swiglu(torch.zeros(2, 7)),
    "npu_swiglu: input must be contiguous, not [1, 2]": lambda: operators.swiglu(torch.zeros(8, 2).T),
    "npu_swiglu: input must be a tensor that is not empty, not [0, 8]": lambda: operators.swiglu(torch.zeros(0, 8)),
    "npu_swiglu: input.dtype must be float16, bfloat16 or float32, not torch.float64": lambda: operators.swiglu(
        torch.zeros(2, 8, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize(("sentence", "call"), BROKEN_OTHERS.items(), ids=list(BROKEN_OTHERS))
def test_the_others_name_the_broken_rule_and_do_not_call(sentence, call):
    with pytest.raises(OperatorError) as caught:
        call()
    assert caught.value.message == sentence


def test_right_calls_pass_the_operators_own_rules(npu):
    assert attention_call().shape == (4, HEADS, DIM)
    assert attention_call(window=5).shape == (4, HEADS, DIM)
    scatter_call()
    scatter_call(slots=torch.tensor([3, 700, 5]))


def test_scatter_writes_each_token_to_its_slot(npu):
    key, value = torch.randn(2, 3, KV_HEADS, DIM).half()
    key_cache, value_cache = torch.zeros(2, BLOCKS, SIZE, KV_HEADS, DIM).half()
    slots = [3, 700, 5]
    scatter_call(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=torch.tensor(slots, dtype=torch.int32)
    )
    assert torch.equal(key_cache.view(-1, KV_HEADS, DIM)[slots], key)
    assert torch.equal(value_cache.view(-1, KV_HEADS, DIM)[slots], value)
    assert int((key_cache != 0).any(-1).any(-1).sum()) == len(slots)


def test_swiglu_and_rms_norm_and_rotary_compute_what_they_say(npu):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 4, 64, generator=generator)
    weight = torch.randn(64, generator=generator)
    assert torch.allclose(
        operators.rms_norm(x, weight, epsilon=1e-5),
        torch.nn.functional.rms_norm(x, (64,), weight, 1e-5),
        atol=1e-6,
    )
    gate, up = x.chunk(2, -1)
    assert torch.allclose(operators.swiglu(x), torch.nn.functional.silu(gate) * up, atol=1e-6)
    angle = torch.randn(1, 5, 1, 32, generator=generator)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
    assert torch.allclose(operators.rotary(x, cos, sin), torch.cat(turned.unbind(-1), -1), atol=1e-5)


def test_capabilities_without_torch_npu():
    found = operators.capabilities()
    assert found.available == frozenset()
    assert set(found.missing) == set(Operator)
    assert "npu_rms_norm: no (torch-npu has no such operator)" in str(found)


def test_capabilities_tell_what_is_there():
    some = {name: REFERENCES[name] for name in ("npu::npu_rms_norm", "npu::npu_swiglu")}
    with npu_operators(some):
        found = operators.capabilities()
    assert found.available == {Operator.RMS_NORM, Operator.SWIGLU}
    assert "npu_swiglu: yes" in str(found)


def test_an_operator_that_has_lost_an_argument_is_not_there():
    renamed = {**SIGNATURES, "npu_rms_norm": "npu_rms_norm(Tensor input, Tensor weight, float epsilon=1e-06) -> Tensor"}
    with npu_operators(signatures=renamed):
        found = operators.capabilities()
    assert found.missing == {Operator.RMS_NORM: "it takes no argument gamma"}


def test_the_310p_reference_has_no_attention():
    with npu_operators(references_for("Ascend310P3")), pytest.raises(RuntimeError, match="no kernel on Ascend310P3"):
        attention_call()


def test_the_module_imports_without_torch_npu():
    code = "import sys; sys.modules['torch_npu'] = None; import tengserve_backend.devices.npu.operators"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
