"""Which forward a model gets: packed where that is proven right at load, else one sequence at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.check import find_attention_fault
from tengserve_backend.execution.attention.observe import ObservedAttention
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.registry import IMPLEMENTATION
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.execution.forward import ModelForward
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed import PackedForward, chunked_layers
from tengserve_backend.execution.per_sequence import PerSequenceForward
from tengserve_backend.execution.selfcheck import check_blocks, check_logits, expected_logits, find_fault

_log = logging.getLogger(__name__)

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Their frequencies follow the longest sequence of the batch, so a neighbour would change an answer.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """How a model runs.

    Attributes:
        attention: how it attends when it runs packed over pages; None when it runs one sequence at a time.
        reason: why it is not packed, "" when it is.
        bytes_per_token: cache memory that one token takes, in all layers.
        block_size: tokens a block.
        logit_width: scores that the model gives a token.
        shapes: what each attention layer keeps for a token; none when not packed.
        needs: what its layers ask of attention; none when not packed.
    """

    attention: AttentionTier | None
    reason: str
    bytes_per_token: int
    block_size: int
    logit_width: int
    shapes: Mapping[int, LayerShape] = field(default_factory=dict)
    needs: frozenset[AttentionNeeds] = frozenset()

    @property
    def packed(self) -> bool:
        """Whether sequences run packed over pages."""
        return self.attention is not None


def choose_forward(
    model: Any, device: DeviceBackend, *, vocab_size: int, dtype: torch.dtype, portable: bool = False
) -> ForwardChoice:
    """Try the packed forward on a tiny input, then the per-sequence one.

    The portable attention tier goes first: it shows what the model asks of attention, and so which of the device's
    other tiers can serve it. Of these the first is taken that passes the same tests, with a warning for those before.
    Afterwards the model's attention implementation is the one that the choice needs.

    Args:
        model: in evaluation mode, on the device.
        device: where it is.
        vocab_size: token ids that it takes.
        dtype: that it computes in.
        portable: take no other attention tier.

    Raises:
        ConfigurationError: neither forward gives the model's own answer.
    """
    native = model.config._attn_implementation
    expected = expected_logits(model, vocab_size, device.torch_device)
    reason = static_reason(model)
    if not reason:
        model.set_attn_implementation(IMPLEMENTATION)
        attention = ObservedAttention(PortableAttention())
        choice = _try_packed(model, attention, device, expected, vocab_size=vocab_size, dtype=dtype)
        if isinstance(choice, ForwardChoice):
            choice = dataclasses.replace(choice, needs=attention.needs())
            if not portable:
                tier = choose_attention(choice, model, device, vocab_size=vocab_size, dtype=dtype)
                choice = dataclasses.replace(choice, attention=tier, block_size=tier.block_size)
            return choice
        reason = choice
        model.set_attn_implementation(native)
    alone = _per_sequence(model, device.torch_device, expected.shape[1])
    fault = find_fault(alone, expected, device, vocab_size=vocab_size, dtype=dtype)
    if fault:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be served. Packed: {reason}. One sequence at a time: {fault}"
        )
    return ForwardChoice(None, reason, _cache_bytes_per_token(model, dtype), alone.block_size, alone.logit_width)


def choose_attention(
    choice: ForwardChoice, model: Any, device: DeviceBackend, *, vocab_size: int, dtype: torch.dtype
) -> AttentionTier:
    """The best of a device's tiers that is right for a model, with a warning for each before it that is not.

    Right is what the portable tier answers with the same model, whose other parts may have been fused meanwhile.

    Args:
        choice: how the model runs packed; the portable tier has passed for it.
        model, device, vocab_size, dtype: as in `choose_forward`. The model's attention is ours.
    """
    expected: torch.Tensor | None = None
    for tier in device.attention_tiers(choice.needs, dtype):
        if isinstance(tier, PortableAttention):
            return tier
        if expected is None:
            portable = _scratch(model, PortableAttention(), device, choice.logit_width, dtype)
            expected = check_logits(portable, device, vocab_size=vocab_size)
        fault = find_attention_fault(tier, choice.needs, device, dtype=dtype)
        if not fault:
            tried = _try_packed(model, tier, device, expected, vocab_size=vocab_size, dtype=dtype)
            if isinstance(tried, ForwardChoice):
                return tier
            fault = tried
        _log.warning("attention tier %s is not used: in its self-check %s", tier.name, fault)
    raise AssertionError("every device offers the portable tier last")


def build_forward(
    choice: ForwardChoice, model: Any, *, total_blocks: int, device: DeviceBackend, dtype: torch.dtype
) -> ModelForward:
    """The chosen forward, with all of its cache reserved.

    Raises:
        ConfigurationError: there is no such amount of memory.
    """
    if choice.attention is None:
        return _per_sequence(model, device.torch_device, choice.logit_width)
    cache = PagedKVCache(
        total_blocks=total_blocks, block_size=choice.block_size, dtype=dtype, device=device.torch_device
    )
    try:
        cache.reserve(choice.shapes)
    except (RuntimeError, MemoryError) as error:
        if device.is_fault(error):
            raise
        raise ConfigurationError(
            f"the KV cache of {total_blocks} blocks of {choice.block_size * choice.bytes_per_token} bytes "
            "cannot be reserved; lower kvCacheMemory, maxBatchSize or maxSeqLen"
        ) from error
    return _packed(model, cache, choice.attention, choice.logit_width)


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


def _try_packed(
    model: Any,
    attention: AttentionTier,
    device: DeviceBackend,
    expected: torch.Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype,
) -> ForwardChoice | str:
    """The packed forward with a tier, or why it is not right for this model."""
    forward = _scratch(model, attention, device, expected.shape[1], dtype)
    cache = forward.cache
    fault = find_fault(forward, expected, device, vocab_size=vocab_size, dtype=dtype)
    if reason := fault or _missing_layers(model, cache):
        return reason
    shapes = cache.shapes
    bytes_per_token = sum(shape.bytes_per_token(dtype) for shape in shapes.values())
    return ForwardChoice(attention, "", bytes_per_token, attention.block_size, forward.logit_width, shapes)


def _scratch(
    model: Any, attention: AttentionTier, device: DeviceBackend, logit_width: int, dtype: torch.dtype
) -> PackedForward:
    """The packed forward with a cache that is just large enough for the self-check."""
    cache = PagedKVCache(
        total_blocks=check_blocks(attention.block_size),
        block_size=attention.block_size,
        dtype=dtype,
        device=device.torch_device,
    )
    return _packed(model, cache, attention, logit_width)


def _packed(model: Any, cache: PagedKVCache, attention: AttentionTier, logit_width: int) -> PackedForward:
    chunks = chunked_layers(model.config.get_text_config())
    return PackedForward(model=model, cache=cache, attention=attention, logit_width=logit_width, chunks=chunks)


def _per_sequence(model: Any, device: torch.device, logit_width: int) -> PerSequenceForward:
    dependent = has_batch_dependent_rope(model.config.get_text_config())
    return PerSequenceForward(model=model, device=device, logit_width=logit_width, length_dependent=dependent)


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
