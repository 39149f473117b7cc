"""Can this model run packed? Asked at every load, for some models accept our attention and then answer wrongly.

Two short sequences run packed, in chunks and with a decode, and once each alone with transformers' own attention. The
logits must agree and each layer must have come to our attention exactly once a step. Only this catches models that
never call the attention registry, or that mix what is packed (reference: packed-forward, section 1).
"""

from __future__ import annotations

from typing import Any

import torch

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.registry import IMPLEMENTATION
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed_batch import pack
from tengserve_backend.execution.runner import forward_packed
from tengserve_backend.scheduling.step import ScheduledSequence, Step

_FIRST_LENGTH, _SECOND_LENGTH, _SECOND_CHUNK = 6, 9, 4
# Share of the largest logit; a wrong path is off by about the whole of it.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@torch.inference_mode()
def check_packed_forward(
    model: Any, tier: AttentionTier, *, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> dict[int, LayerShape]:
    """Prove the packed forward on a tiny input.

    Returns:
        what each attention layer keeps for a token, by layer index.

    Raises:
        ConfigurationError: the model's packed answer differs from its own.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (_FIRST_LENGTH, _SECOND_LENGTH)
    )
    model.set_attn_implementation("eager")
    alone_first = _forward_alone(model, first, device)
    expected = torch.stack([alone_first[-2], alone_first[-1], _forward_alone(model, second, device)[-1]])
    model.set_attn_implementation(IMPLEMENTATION)

    blocks = -(-_SECOND_LENGTH // tier.block_size)
    table_first, table_second = tuple(range(blocks)), tuple(range(blocks, 2 * blocks))
    cache = PagedKVCache(total_blocks=2 * blocks, block_size=tier.block_size, dtype=dtype, device=device)
    prefill = Step(
        0,
        (
            ScheduledSequence(0, 0, tuple(first[:-1]), table_first, samples=True),
            ScheduledSequence(1, 0, tuple(second[:_SECOND_CHUNK]), table_second, samples=False),
        ),
    )
    mixed = Step(
        1,
        (
            ScheduledSequence(0, _FIRST_LENGTH - 1, tuple(first[-1:]), table_first, samples=True),
            ScheduledSequence(1, _SECOND_CHUNK, tuple(second[_SECOND_CHUNK:]), table_second, samples=True),
        ),
    )
    try:
        packed = torch.cat(
            [
                forward_packed(model, pack(step, block_size=tier.block_size, device=device), cache, tier).float()
                for step in (prefill, mixed)
            ]
        )
    except (RuntimeError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise ConfigurationError(_refusal(model, f"it fails with {type(error).__name__}")) from error
    layers = model.config.get_text_config().num_hidden_layers
    if set(cache.shapes) != set(range(layers)):
        raise ConfigurationError(
            _refusal(model, f"{len(cache.shapes)} of its {layers} layers use the attention registry")
        )
    if packed.shape != expected.shape:
        raise ConfigurationError(_refusal(model, "it does not give the logits of chosen positions"))
    error_share = float((packed - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not error_share <= _TOLERANCE[dtype]:
        raise ConfigurationError(
            _refusal(model, f"its logits differ from its own single-sequence forward by {error_share:.1%}")
        )
    return cache.shapes


def _forward_alone(model: Any, token_ids: list[int], device: torch.device) -> torch.Tensor:
    """Logits [n, vocabulary] of one sequence by transformers alone."""
    output = model(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
    logits: torch.Tensor = output.logits.squeeze(0).float()
    return logits


def _refusal(model: Any, reason: str) -> str:
    return f"{type(model).__name__} cannot be served: run packed with other sequences, {reason}"
