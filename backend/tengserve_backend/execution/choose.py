"""Which forward a model gets: packed where that is proven right at load, else one sequence at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.registry import IMPLEMENTATION
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.forward import ModelForward
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed import PackedForward, chunked_layers
from tengserve_backend.execution.per_sequence import PerSequenceForward
from tengserve_backend.execution.selfcheck import check_blocks, expected_logits, find_fault

_log = logging.getLogger(__name__)

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Their frequencies follow the longest sequence of the batch, so a neighbour would change an answer.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """How a model runs.

    Attributes:
        packed: whether packed over pages.
        reason: why not, "" when packed.
        bytes_per_token: cache memory that one token takes, in all layers.
        block_size: tokens a block.
        shapes: what each attention layer keeps for a token; none when not packed.
    """

    packed: bool
    reason: str
    bytes_per_token: int
    block_size: int
    shapes: Mapping[int, LayerShape] = field(default_factory=dict)


def choose_forward(
    model: Any, attention: AttentionTier, *, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> ForwardChoice:
    """Try the packed forward on a tiny input, then the per-sequence one.

    Afterwards the model's attention implementation is the one that the choice needs.

    Raises:
        ConfigurationError: neither gives the model's own answer.
    """
    native = model.config._attn_implementation
    expected = expected_logits(model, vocab_size, device)
    reason = static_reason(model)
    if not reason:
        model.set_attn_implementation(IMPLEMENTATION)
        cache = PagedKVCache(
            total_blocks=check_blocks(attention.block_size),
            block_size=attention.block_size,
            dtype=dtype,
            device=device,
        )
        forward = _packed(model, cache, attention, device)
        reason = find_fault(forward, expected, vocab_size=vocab_size, dtype=dtype) or _missing_layers(model, cache)
        if not reason:
            shapes = cache.shapes
            bytes_per_token = sum(shape.bytes_per_token(dtype) for shape in shapes.values())
            return ForwardChoice(True, "", bytes_per_token, attention.block_size, shapes)
        model.set_attn_implementation(native)
    alone = _per_sequence(model, device)
    fault = find_fault(alone, expected, vocab_size=vocab_size, dtype=dtype)
    if fault:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be served. Packed: {reason}. One sequence at a time: {fault}"
        )
    return ForwardChoice(False, reason, _cache_bytes_per_token(model, dtype), alone.block_size)


def build_forward(
    choice: ForwardChoice,
    model: Any,
    attention: AttentionTier,
    *,
    total_blocks: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelForward:
    """The chosen forward, with all of its cache reserved.

    Raises:
        ConfigurationError: there is no such amount of memory.
    """
    if not choice.packed:
        return _per_sequence(model, device)
    cache = PagedKVCache(total_blocks=total_blocks, block_size=choice.block_size, dtype=dtype, device=device)
    try:
        cache.reserve(choice.shapes)
    except (RuntimeError, MemoryError) as error:
        raise ConfigurationError(
            f"the KV cache of {total_blocks} blocks of {choice.block_size * choice.bytes_per_token} bytes "
            "cannot be reserved; lower kvCacheMemory, maxBatchSize or maxSeqLen"
        ) from error
    return _packed(model, cache, attention, device)


def static_reason(model: Any) -> str:
    """What the model itself says against packing: one clause, or ""."""
    config = model.config.get_text_config()
    if not type(model)._can_set_attn_implementation():
        return "its attention cannot be replaced"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := layer_types - _PACKABLE_LAYERS:
        return f"it has layers of type {', '.join(sorted(unknown))}"
    if has_batch_dependent_rope(config):
        return "its rotary frequencies depend on the longest sequence of a batch"
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    return ""


def has_batch_dependent_rope(config: Any) -> bool:
    """Whether a neighbour in the batch would change the positions' meaning."""

    def kinds(value: object) -> set[str]:
        if not isinstance(value, Mapping):
            return set()
        own = {str(value[key]) for key in ("rope_type", "type") if key in value}
        return own.union(*(kinds(nested) for nested in value.values()))

    found = kinds(getattr(config, "rope_parameters", None)) | kinds(getattr(config, "rope_scaling", None))
    return bool(found & _BATCH_DEPENDENT_ROPE)


def _packed(model: Any, cache: PagedKVCache, attention: AttentionTier, device: torch.device) -> PackedForward:
    chunks = chunked_layers(model.config.get_text_config())
    return PackedForward(model=model, cache=cache, attention=attention, device=device, chunks=chunks)


def _per_sequence(model: Any, device: torch.device) -> PerSequenceForward:
    dependent = has_batch_dependent_rope(model.config.get_text_config())
    return PerSequenceForward(model=model, device=device, length_dependent=dependent)


def _missing_layers(model: Any, cache: PagedKVCache) -> str:
    layers = int(model.config.get_text_config().num_hidden_layers)
    if set(cache.shapes) == set(range(layers)):
        return ""
    return f"{len(cache.shapes)} of its {layers} layers use the attention registry"


def _cache_bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """What transformers' own cache keeps for a token at most, by the configuration; it is not ours to lay out."""
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(config.num_hidden_layers) * kv_heads * head_dim * 2 * dtype.itemsize
