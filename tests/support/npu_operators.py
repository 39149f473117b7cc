"""The namespace `npu` of torch's operators without torch_npu: the wheel's signatures over our reference functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from support.npu_reference import REFERENCES

_INTS = "int pre_tokens=2147483647, int next_tokens=2147483647"
_MODES = "int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0"
_QUANTIZED = (
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None"
)
_SHARED = (
    "Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None"
)

SIGNATURES: Mapping[str, str] = {
    "npu_fused_infer_attention_score": (
        "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
        "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
        f"{_QUANTIZED}, Tensor? block_table=None, {_SHARED}, int num_heads=1, float scale=1.0, {_INTS}, "
        'str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, '
        f"int block_size=0, {_MODES}, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
    ),
    "npu_scatter_pa_kv_cache": (
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
        "Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()"
    ),
    "npu_rms_norm": "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": (
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
    ),
    "npu_swiglu": "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
}
"""As every supported torch-npu registers them; tests/unit/devices/npu/test_signatures.py compares."""


@contextmanager
def npu_operators(
    functions: Mapping[str, Callable[..., Any]] = REFERENCES, signatures: Mapping[str, str] = SIGNATURES
) -> Iterator[None]:
    """Define the operators, for the block.

    Args:
        functions: what an operator does, by its qualified name; an operator without a function is not defined.
        signatures: by operator.
    """
    library = torch.library.Library("npu", "FRAGMENT")
    try:
        for name, signature in signatures.items():
            if function := functions.get(f"npu::{name}"):
                library.define(signature)
                library.impl(name, function, "CompositeExplicitAutograd")
        yield
    finally:
        library._destroy()
