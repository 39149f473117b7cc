"""The one module that names torch_npu's operators: what exists here, and one checked call for each that we use.

An operator that is called against its rules fails on the device, later, with a number, or answers wrongly. So each
function here checks what its operator's document asks for before the call, by what the host knows: shapes, dtypes,
strides and integers. Nothing here waits for the device.

A first tensor that the wheels' declarations call `self` goes by position: what they register calls it `input`.

Rules: the operators' pages among the op-plugin documents of torch-npu (custom_APIs/torch_npu).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tengserve_backend.errors import OperatorError

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""What attention computes in."""

MASK_SIZE = 2048
"""Rows and columns of the one mask that causal attention takes, whatever the lengths."""

MAX_BATCH = 4096
"""Sequences that one call of attention takes."""

MAX_DECODE_CONTEXT = 262144
"""Tokens of a sequence that attention takes one query of."""

_FLOATS = (*HALF_DTYPES, torch.float32)
# Of packed queries over pages. 192 is there too, but not for values in pages; nothing else is.
_HEAD_DIMS = (64, 128)
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_PAGE_WIDTH = 65535
_MAX_ROTARY_HEADS = 999
_MAX_ROTARY_DIM = 894
_MIN_NORM_BYTES = 32
_UNBOUNDED = 2**31 - 1
_CAUSAL, _BAND = 3, 4


class Operator(enum.Enum):
    """Operators that we use, by their name in the namespace `npu`."""

    ATTENTION = "npu_fused_infer_attention_score"
    SCATTER_CACHE = "npu_scatter_pa_kv_cache"
    RMS_NORM = "npu_rms_norm"
    ROTARY = "npu_rotary_mul"
    SWIGLU = "npu_swiglu"


_ARGUMENTS: Mapping[Operator, tuple[str, ...]] = {
    Operator.ATTENTION: (
        *("query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table"),
        *("num_heads", "scale", "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode"),
        "block_size",
    ),
    Operator.SCATTER_CACHE: ("key", "value", "key_cache", "value_cache", "slot_mapping", "cache_mode"),
    Operator.RMS_NORM: ("gamma", "epsilon"),
    Operator.ROTARY: ("r1", "r2", "rotary_mode"),
    Operator.SWIGLU: ("dim",),
}
"""What the functions below pass by name. The first argument of the last three has two names: torch-npu declares it as
`self` and registers it as `input`, so it goes by position."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which of the operators that we use the installed torch-npu has.

    Attributes:
        available: can be called.
        missing: why another one cannot: one clause each.
    """

    available: frozenset[Operator]
    missing: Mapping[Operator, str]

    def __str__(self) -> str:
        parts = [f"{found.value}: yes" for found in Operator if found in self.available]
        parts += [f"{absent.value}: no ({reason})" for absent, reason in self.missing.items()]
        return ", ".join(parts)


def capabilities() -> Capabilities:
    """Look the operators up. It says what can be called, not that the chip has a kernel for it."""
    missing = {wanted: reason for wanted in Operator if (reason := _missing(wanted))}
    return Capabilities(frozenset(set(Operator) - missing.keys()), missing)


def _missing(wanted: Operator) -> str:
    schemas = torch._C._jit_get_schemas_for_operator(f"npu::{wanted.value}")
    for schema in schemas:
        if not schema.overload_name:
            lacking = set(_ARGUMENTS[wanted]) - {argument.name for argument in schema.arguments}
            return f"it takes no argument {', '.join(sorted(lacking))}" if lacking else ""
    return "torch-npu has no such operator"


def causal_mask(device: torch.device) -> torch.Tensor:
    """The mask that `attention` takes: int8 [2048, 2048], 1 above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu(1).to(device)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor,
    query_ends: Sequence[int],
    contexts: Sequence[int],
    block_table: torch.Tensor,
    kv_heads: int,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of packed queries over pages; each sequence's queries are the last of its tokens.

    Args:
        query: [T, query heads, dim].
        keys, values: [blocks, block size, kv heads * dim].
        mask: of `causal_mask`.
        query_ends: where each sequence's queries end in the row; the last is T.
        contexts: tokens of each sequence in the pages.
        block_table: int32 [sequences, blocks of the longest]; block numbers of each sequence in order.
        kv_heads: heads of keys and of values.
        scaling: factor of the scores.
        window: a query sees this many keys, its own included; None sees all before it.

    Returns:
        [T, query heads, dim].

    Raises:
        OperatorError: a rule of the operator is broken.
    """
    _check_attention(query, keys, values, mask, kv_heads, window)
    _check_lengths(query.shape[0], query_ends, contexts, block_table, keys)
    # In the band a query sees pre_tokens keys before its own: the drawings of the document count so.
    answer, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query=query,
        key=keys,
        value=values,
        atten_mask=mask,
        actual_seq_lengths=query_ends,
        actual_seq_lengths_kv=contexts,
        block_table=block_table,
        num_heads=query.shape[1],
        scale=scaling,
        pre_tokens=_UNBOUNDED if window is None else window - 1,
        next_tokens=_UNBOUNDED if window is None else 0,
        input_layout="TND",
        num_key_value_heads=kv_heads,
        sparse_mode=_CAUSAL if window is None else _BAND,
        block_size=keys.shape[1],
    )
    return answer  # type: ignore[no-any-return]  # torch.ops is untyped


def attention_rule(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str:
    """The rule of `attention` that such queries, keys and values break: one clause, or ""."""
    if dtype not in HALF_DTYPES:
        return f"dtype must be float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if dim not in _HEAD_DIMS:
        return f"head dim must be {' or '.join(map(str, _HEAD_DIMS))}, not {dim}"
    if heads > _MAX_HEADS:
        return f"heads must be at most {_MAX_HEADS}, not {heads}"
    if heads % kv_heads or heads > kv_heads * _MAX_GROUP:
        return f"heads must be a multiple of the {kv_heads} of keys, at most {_MAX_GROUP} times as many, not {heads}"
    if kv_heads * dim > _MAX_PAGE_WIDTH:
        return f"heads of keys times head dim must be at most {_MAX_PAGE_WIDTH}, not {kv_heads * dim}"
    return ""


def _check_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, kv_heads: int, window: int | None
) -> None:
    """The part that does not change from step to step."""
    name = Operator.ATTENTION
    _require(name, "query", query.dim() == 3, "[T, heads, dim]", query.shape)
    _, heads, dim = query.shape
    if reason := attention_rule(heads, kv_heads, dim, query.dtype):
        raise OperatorError(f"{name.value}: {reason}")
    paged = keys.dim() == 3 and keys.shape[2] == kv_heads * dim
    _require(name, "keys", paged, "[blocks, block size, heads * dim]", keys.shape)
    _require(name, "values", values.shape == keys.shape, "of the keys' shape {}", values.shape, keys.shape)
    size = keys.shape[1]
    _require(name, "block size", size % 128 == 0 and size <= 512, "128, 256, 384 or 512", size)
    for field, tensor in (("query", query), ("keys", keys), ("values", values)):
        _require(name, f"{field}.dtype", tensor.dtype == query.dtype, "{} as the query", tensor.dtype, query.dtype)
        _require(name, field, tensor.is_contiguous(), "contiguous", tensor.stride())
    _require(name, "mask", mask.shape == (MASK_SIZE, MASK_SIZE), "[2048, 2048]", mask.shape)
    _require(name, "mask.dtype", mask.dtype in (torch.int8, torch.uint8, torch.bool), "int8, uint8 or bool", mask.dtype)
    _require(name, "window", window is None or window >= 1, "at least 1", window)


def _check_lengths(
    total: int, query_ends: Sequence[int], contexts: Sequence[int], block_table: torch.Tensor, keys: torch.Tensor
) -> None:
    """The step's own part. The document also wants as many blocks as all sequences have together; shared ones count
    once in practice, or no server could keep a common prefix once."""
    name = Operator.ATTENTION
    size = keys.shape[1]
    sequences = len(query_ends)
    _require(name, "sequences", 1 <= sequences <= MAX_BATCH, "1 to {}", sequences, MAX_BATCH)
    _require(name, "query ends", query_ends[-1] == total, "up to the {} queries", query_ends[-1], total)
    _require(name, "contexts", len(contexts) == sequences, "one for each of {} sequences", len(contexts), sequences)
    # These run in every layer of every step, so no Python code runs for an element.
    counts = list(map(operator.sub, query_ends, (0, *query_ends[:-1])))
    _require(name, "queries of a sequence", min(counts) >= 1, "at least 1", min(counts))
    spare = min(map(operator.sub, contexts, counts))
    _require(name, "context less its queries", spare >= 0, "at least 0", spare)
    longest = max(contexts)
    if longest > MAX_DECODE_CONTEXT:
        decoding = max((context for context, count in zip(contexts, counts, strict=True) if count == 1), default=0)
        _require(
            name, "context of a decode", decoding <= MAX_DECODE_CONTEXT, "at most {}", decoding, MAX_DECODE_CONTEXT
        )
    table = block_table.shape
    _require(name, "block table", len(table) == 2 and table[0] == sequences, "[{}, blocks]", table, sequences)
    _require(name, "block table", table[1] * size >= longest, "wide enough for {} tokens", table, longest)
    _require(name, "block_table.dtype", block_table.dtype is torch.int32, "torch.int32", block_table.dtype)
    _require(name, "block table", block_table.is_contiguous(), "contiguous", block_table.stride())
    needed = -(-longest // size)
    _require(name, "blocks", keys.shape[0] >= needed, "at least the {} of the longest sequence", keys.shape[0], needed)


def scatter_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *, slots: torch.Tensor
) -> None:
    """Write tokens to slots of a cache, in place.

    Args:
        key: [T, heads, key dim].
        value: [T, heads, value dim].
        key_cache: [blocks, block size, heads, key dim].
        value_cache: [blocks, block size, heads, value dim].
        slots: int32 or int64 [T]; each in the cache, and no slot twice.

    Raises:
        OperatorError: a rule of the operator is broken.
    """
    name = Operator.SCATTER_CACHE
    for field, tokens, pages in (("key", key, key_cache), ("value", value, value_cache)):
        _require(name, field, tokens.dim() == 3, "[T, heads, dim]", tokens.shape)
        _require(
            name,
            field,
            tokens.shape[:2] == key.shape[:2],
            "of the key's tokens and heads {}",
            tokens.shape,
            key.shape[:2],
        )
        _require(name, f"{field} cache", pages.dim() == 4, "[blocks, block size, heads, dim]", pages.shape)
        _require(
            name, f"{field} cache", pages.shape[2:] == tokens.shape[1:], "of heads {}", pages.shape, tokens.shape[1:]
        )
        _require(name, f"{field} cache", pages.shape[:2] == key_cache.shape[:2], "of the keys' blocks", pages.shape)
        _require(
            name,
            f"{field}.dtype",
            tokens.dtype == pages.dtype == key_cache.dtype,
            "{} as the cache",
            tokens.dtype,
            pages.dtype,
        )
        _require(name, field, tokens.is_contiguous(), "contiguous", tokens.stride())
        _require(name, f"{field} cache", pages.is_contiguous(), "contiguous", pages.stride())
    _require(name, "slots", slots.shape == key.shape[:1], "[{}]", slots.shape, key.shape[0])
    _require(name, "slots.dtype", slots.dtype in (torch.int32, torch.int64), "int32 or int64", slots.dtype)
    _require(name, "slots", slots.is_contiguous(), "contiguous", slots.stride())
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slots,
        # The default belongs to caches in a private layout.
        cache_mode="Norm",
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + epsilon) * weight over the last dimension, in x's dtype.

    Args:
        x: [..., size], two to eight dimensions.
        weight: [size], in x's dtype, or in float32.

    Raises:
        OperatorError: a rule of the operator is broken.
    """
    name = Operator.RMS_NORM
    _require(name, "x", 2 <= x.dim() <= 8, "a tensor of 2 to 8 dimensions", x.shape)
    _require(name, "x.dtype", x.dtype in _FLOATS, "float16, bfloat16 or float32", x.dtype)
    _require(name, "weight", weight.shape == x.shape[-1:], "{}", weight.shape, x.shape[-1:])
    _require(
        name, "weight.dtype", weight.dtype in (x.dtype, torch.float32), "{} or torch.float32", weight.dtype, x.dtype
    )
    size = x.shape[-1] * x.element_size()
    _require(name, "bytes of a row", size >= _MIN_NORM_BYTES, "at least {}", size, _MIN_NORM_BYTES)
    normed, _ = torch.ops.npu.npu_rms_norm(x, gamma=weight, epsilon=epsilon)
    return normed  # type: ignore[no-any-return]  # torch.ops is untyped


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + turned(x) * sin, where the second half of a head, negated, comes before the first.

    Args:
        x: [batch, T, heads, dim].
        cos, sin: [1 or batch, T, 1, dim], in x's dtype.

    Raises:
        OperatorError: a rule of the operator is broken.
    """
    name = Operator.ROTARY
    _require(name, "x", x.dim() == 4, "[batch, T, heads, dim]", x.shape)
    _require(name, "x.dtype", x.dtype in _FLOATS, "float16, bfloat16 or float32", x.dtype)
    batch, total, heads, dim = x.shape
    _require(name, "dim", dim % 2 == 0 and dim <= _MAX_ROTARY_DIM, "even and at most {}", dim, _MAX_ROTARY_DIM)
    most = max(batch, heads)
    _require(name, "batch and heads", most <= _MAX_ROTARY_HEADS, "at most {}", most, _MAX_ROTARY_HEADS)
    for field, factor in (("cos", cos), ("sin", sin)):
        fits = factor.shape in ((1, total, 1, dim), (batch, total, 1, dim))
        _require(name, field, fits, "[1 or {}, {}, 1, {}]", factor.shape, batch, total, dim)
        _require(name, field, factor.shape == cos.shape, "of cos's shape {}", factor.shape, cos.shape)
        _require(name, f"{field}.dtype", factor.dtype == x.dtype, "{}", factor.dtype, x.dtype)
    return torch.ops.npu.npu_rotary_mul(x, r1=cos, r2=sin, rotary_mode="half")  # type: ignore[no-any-return]  # torch.ops is untyped


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_and_up: [..., 2 * size]: gate, then up; contiguous.

    Returns:
        [..., size].

    Raises:
        OperatorError: a rule of the operator is broken.
    """
    name = Operator.SWIGLU
    _require(name, "input", 1 <= gate_and_up.dim() <= 8, "a tensor of 1 to 8 dimensions", gate_and_up.shape)
    _require(name, "input", gate_and_up.numel() > 0, "a tensor that is not empty", gate_and_up.shape)
    _require(name, "size", gate_and_up.shape[-1] % 2 == 0, "even", gate_and_up.shape[-1])
    _require(name, "input.dtype", gate_and_up.dtype in _FLOATS, "float16, bfloat16 or float32", gate_and_up.dtype)
    _require(name, "input", gate_and_up.is_contiguous(), "contiguous", gate_and_up.stride())
    return torch.ops.npu.npu_swiglu(gate_and_up, dim=-1)  # type: ignore[no-any-return]  # torch.ops is untyped


def _require(called: Operator, field: str, holds: bool, rule: str, given: object, *facts: object) -> None:
    """The sentence is made only when it is needed: this runs many times in each layer of each step."""
    if not holds:
        raise OperatorError(f"{called.value}: {field} must be {rule.format(*map(_plain, facts))}, not {_plain(given)}")


def _plain(fact: object) -> object:
    return list(fact) if isinstance(fact, tuple) else fact
