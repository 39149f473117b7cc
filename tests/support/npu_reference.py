"""What the fused NPU operators that we call compute, in plain torch, with their documented rules as assertions.

Source of every rule: the operator's page in the op-plugin documents of torch-npu (custom_APIs/torch_npu). The contract
tests install these functions in place of the operators; the simulated NPU registers them on its device. They see CPU
tensors, compute in float32 and keep to the signatures of the wheel: argument order, names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)
_MAX_INT = 2147483647
_MASK_SIZE = 2048
_TND_HEAD_DIMS = (64, 128, 192)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(rule)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _MAX_INT,
    next_tokens: int = _MAX_INT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries (layout TND) over packed or paged keys and values.

    Args:
        query: [T, num_heads, D].
        key, value: [Tk, kv heads, D], or paged with `block_table`: [blocks, block_size, kv heads * D] or
            [blocks, kv heads, block_size, D].
        atten_mask: the 2048 x 2048 upper triangle for modes 3 and 4, nothing for mode 0.
        actual_seq_lengths: cumulative query counts; their number is the batch.
        actual_seq_lengths_kv: cumulative counts of packed keys; each sequence's own length when paged.
        block_table: int32 [batch, blocks a sequence].
        pre_tokens, next_tokens: of mode 4: a query sees from `pre_tokens` keys before its own to `next_tokens` after;
            the last query's own key is the last key. Its own one counts besides.
        sparse_mode: 0 all keys, 3 causal from the lower right corner, 4 the band.

    Returns:
        [T, num_heads, D] and [0.0].
    """
    _require(not any(others.values()), f"no reference for {sorted(name for name, given in others.items() if given)}")
    _require(input_layout == "TND", f"no reference for layout {input_layout}")
    _require(not softmax_lse_flag, "no reference for softmax_lse_flag")
    _require(inner_precise in (0, 1, 2, 3), f"inner_precise {inner_precise}")
    kv_heads = num_key_value_heads or num_heads
    _require(query.dim() == 3 and query.shape[1] == num_heads, f"query {tuple(query.shape)}, num_heads {num_heads}")
    total, _, dim = query.shape
    _require(dim in _TND_HEAD_DIMS, f"When layout is TND, queryD must be 192/128/64, not {dim}")
    _require(query.dtype in _HALF and key.dtype == value.dtype == query.dtype, f"{query.dtype}, {key.dtype}")
    _require(
        query.is_contiguous() and key.is_contiguous() and value.is_contiguous(),
        "query, key and value must be contiguous",
    )
    _require(
        num_heads <= 256 and num_heads % kv_heads == 0 and num_heads // kv_heads <= 64,
        f"{num_heads} query heads, {kv_heads} of keys",
    )
    _require(
        actual_seq_lengths is not None and actual_seq_lengths_kv is not None,
        "layout TND needs the lengths of queries and of keys",
    )
    counts = _differences(actual_seq_lengths)
    _require(
        1 <= len(counts) <= 4096 and actual_seq_lengths[-1] == total, f"{list(actual_seq_lengths)} for T = {total}"
    )
    _require(len(actual_seq_lengths_kv) == len(counts), "one length of keys a sequence")
    _check_mask(atten_mask, sparse_mode)
    if sparse_mode == 4:
        _require(pre_tokens + next_tokens >= 0, "pre_tokens and next_tokens must meet")
    sequences = (
        _packed(key, value, actual_seq_lengths_kv, kv_heads)
        if block_table is None
        else _paged(key, value, actual_seq_lengths_kv, block_table, block_size, kv_heads, dim)
    )
    out = torch.zeros_like(query)
    first = 0
    for count, (keys, values) in zip(counts, sequences, strict=True):
        rows = slice(first, first + count)
        first += count
        context = keys.shape[0]
        _require(sparse_mode == 0 or context >= count, f"{count} queries, {context} keys: a query would see none")
        if count == 0 or context == 0:
            continue
        group = num_heads // kv_heads
        keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("qnd,knd->nqk", query[rows].float(), keys) * scale
        own = torch.arange(count).unsqueeze(1) + (context - count)
        other = torch.arange(context).unsqueeze(0)
        if sparse_mode == 3:
            scores = scores.masked_fill(other > own, float("-inf"))
        elif sparse_mode == 4:
            scores = scores.masked_fill((other > own + next_tokens) | (other < own - pre_tokens), float("-inf"))
        out[rows] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), values).to(out.dtype)
    return out, torch.zeros(1)


def _differences(cumulative: Sequence[int]) -> list[int]:
    counts = [int(end) - int(start) for start, end in zip((0, *cumulative), cumulative, strict=False)]
    _require(all(count >= 0 for count in counts), f"cumulative lengths must not fall: {list(cumulative)}")
    return counts


@cache
def _upper_triangle() -> torch.Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1)


def _check_mask(mask: torch.Tensor | None, sparse_mode: int) -> None:
    _require(sparse_mode in (0, 3, 4), f"no reference for sparse_mode {sparse_mode}")
    if sparse_mode == 0:
        _require(mask is None, "no reference for a mask in mode 0, which real kernels ignore past key 512")
        return
    _require(mask is not None, f"sparse_mode {sparse_mode} needs atten_mask")
    _require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask {mask.dtype}")
    _require(mask.shape[-2:] == (_MASK_SIZE, _MASK_SIZE) and mask.numel() == _MASK_SIZE**2, f"{tuple(mask.shape)}")
    _require(mask.is_contiguous(), "atten_mask must be contiguous")
    _require(
        torch.equal(mask.reshape(_MASK_SIZE, _MASK_SIZE).bool(), _upper_triangle()), "1 above the diagonal, else 0"
    )


def _packed(
    key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], kv_heads: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    _require(
        key.dim() == value.dim() == 3 and key.shape[:2] == value.shape[:2] and key.shape[1] == kv_heads,
        f"packed keys {tuple(key.shape)}, values {tuple(value.shape)}",
    )
    _require(key.shape[2] == value.shape[2], "no reference for another head size of values")
    counts = _differences(lengths)
    _require(lengths[-1] == key.shape[0], "packed lengths of keys are cumulative and end at their number")
    return list(zip(key.split(counts), value.split(counts), strict=True))


def _paged(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
    kv_heads: int,
    dim: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    _require(key.shape == value.shape, "pages of keys and values must have one shape")
    _require(dim != 192, "paged attention has no head size of 192 for values")
    _require(0 < block_size <= 1024 and block_size % 16 == 0, f"block_size {block_size}")
    _require(
        block_table.dtype is torch.int32 and block_table.dim() == 2 and block_table.is_contiguous(),
        "block_table must be int32, contiguous, [batch, blocks]",
    )
    _require(block_table.shape[0] == len(lengths), "one row of block_table a sequence")
    if key.dim() == 3:
        _require(key.shape[1:] == (block_size, kv_heads * dim), f"pages {tuple(key.shape)}")
        _require(kv_heads * dim <= 65535, "pages wider than 65535 need the layout with heads first")
        keys, values = (each.view(-1, block_size, kv_heads, dim) for each in (key, value))
    else:
        _require(key.shape[1:] == (kv_heads, block_size, dim), f"pages {tuple(key.shape)}")
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
    sequences = []
    for row, length in zip(block_table, lengths, strict=True):
        used = -(-int(length) // block_size)
        _require(length >= 0 and used <= row.numel(), f"{length} keys in {row.numel()} blocks of {block_size}")
        blocks = row[:used].long()
        _require(used == 0 or (int(blocks.min()) >= 0 and int(blocks.max()) < key.shape[0]), "no such block")
        sequences.append(
            (
                keys[blocks].reshape(-1, kv_heads, dim)[:length],
                values[blocks].reshape(-1, kv_heads, dim)[:length],
            )
        )
    return sequences


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write tokens to slots of an ordinary cache, in place.

    Args:
        key, value: [tokens, heads, dim].
        key_cache, value_cache: [blocks, block size, heads, dim].
        slot_mapping: int32 or int64 [tokens], each slot once.
        cache_mode: "Norm" or None; the default belongs to a private layout.
    """
    _require(
        cache_mode in (None, "Norm"), f'cache_mode {cache_mode} takes NZ caches only; an ordinary one needs "Norm"'
    )
    _require(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None, "no reference for compression"
    )
    _require(
        slot_mapping.dtype in (torch.int32, torch.int64) and slot_mapping.dim() == 1,
        "slot_mapping must be int32 or int64 [tokens]",
    )
    _require(
        key.dim() == value.dim() == 3 and key.shape[:2] == value.shape[:2],
        f"key {tuple(key.shape)}, value {tuple(value.shape)}",
    )
    _require(key.shape[0] == slot_mapping.shape[0], f"{key.shape[0]} tokens, {slot_mapping.shape[0]} slots")
    for cache_tensor, tokens in ((key_cache, key), (value_cache, value)):
        _require(cache_tensor.dim() == 4 and cache_tensor.shape[2:] == tokens.shape[1:], f"{tuple(cache_tensor.shape)}")
        _require(cache_tensor.dtype == tokens.dtype == key.dtype, f"{cache_tensor.dtype}, {tokens.dtype}")
        _require(cache_tensor.is_contiguous() and tokens.is_contiguous(), "everything must be contiguous")
    _require(
        key_cache.shape[:2] == value_cache.shape[:2] and slot_mapping.is_contiguous(),
        "caches and slot_mapping must fit",
    )
    slots = slot_mapping.long()
    total = key_cache.shape[0] * key_cache.shape[1]
    if slots.numel():
        _require(int(slots.min()) >= 0 and int(slots.max()) < total, f"slots must be in [0, {total})")
        _require(slots.unique().numel() == slots.numel(), "a slot is written twice")
    key_cache.view(total, *key.shape[1:])[slots] = key
    value_cache.view(total, *value.shape[1:])[slots] = value


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * gamma over the last dimensions, and 1 / rms(x) in float32."""
    pairs = {(dtype, dtype) for dtype in (*_HALF, torch.float32)} | {(dtype, torch.float32) for dtype in _HALF}
    _require((input.dtype, gamma.dtype) in pairs, f"{input.dtype} with gamma in {gamma.dtype}")
    _require(2 <= input.dim() <= 8 and input.shape[-gamma.dim() :] == gamma.shape, f"{tuple(input.shape)}")
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(input.float().pow(2).mean(dims, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """x * cos + rotate(x) * sin; r1 is cos, r2 is sin.

    `half` turns the two halves of the last dimension, `interleave` its pairs.
    """
    _require(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode}")
    _require(rotate is None, "no reference for a rotation matrix")
    dim = input.shape[-1]
    _require(
        input.dim() in (3, 4) and r1.dim() == r2.dim() == input.dim() and r1.shape == r2.shape,
        f"{tuple(input.shape)} with {tuple(r1.shape)} and {tuple(r2.shape)}",
    )
    _require(
        input.dtype in (*_HALF, torch.float32) and r1.dtype == r2.dtype == input.dtype,
        f"{input.dtype} with {r1.dtype} and {r2.dtype}",
    )
    _require(dim % 2 == 0 and dim < 896 and r1.shape[-1] == dim, f"{tuple(input.shape)} with {tuple(r1.shape)}")
    _require(all(factor in (1, size) for factor, size in zip(r1.shape, input.shape, strict=True)), f"{tuple(r1.shape)}")
    x = input.float()
    if rotary_mode == "half":
        one, two = x.chunk(2, -1)
        turned = torch.cat((-two, one), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half."""
    _require(1 <= input.dim() <= 8 and input.numel() > 0 and input.is_contiguous(), f"{tuple(input.shape)}")
    _require(
        input.dtype in (*_HALF, torch.float32) and -input.dim() <= dim < input.dim() and input.shape[dim] % 2 == 0,
        f"{input.dtype}, dim {dim} of {tuple(input.shape)}",
    )
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


REFERENCES: dict[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_fused_infer_attention_score,
        npu_scatter_pa_kv_cache,
        npu_rms_norm,
        npu_rotary_mul,
        npu_swiglu,
    )
}
"""The operators on 910B and 910C, by qualified name."""


def references_for(soc: str) -> dict[str, Callable[..., Any]]:
    """The operators as a chip has them.

    Args:
        soc: the chip's name, such as Ascend910B4, Ascend910_9392 or Ascend310P3. On 310P attention and the cache's
            scatter have no kernel, rotary embedding none without operator compilation, and nothing takes bfloat16.
    """
    if not soc.startswith("Ascend310P"):
        return dict(REFERENCES)
    absent = {"npu::npu_fused_infer_attention_score", "npu::npu_scatter_pa_kv_cache", "npu::npu_rotary_mul"}
    return {
        name: _absent(name, soc) if name in absent else _without_bfloat16(function, soc)
        for name, function in REFERENCES.items()
    }


def _absent(name: str, soc: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} has no kernel on {soc}")

    return call


def _without_bfloat16(function: Callable[..., Any], soc: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor) and given.dtype is torch.bfloat16:
                raise RuntimeError(f"{function.__name__} takes no bfloat16 on {soc}")
        return function(*args, **kwargs)

    return call
