"""What a load tells the operator: a line of what is in effect, and a warning for each setting that is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.generation import ModelLimits
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.scheduling.budget import StepTokens

_log = logging.getLogger(__name__)


def tell(
    info: ModelInfo, settings: ModelSettings, *, total_blocks: int, block_size: int, step_tokens: StepTokens
) -> None:
    """Log how a model runs, and what of its settings does not hold.

    Args:
        info: how it runs.
        settings: what was asked for.
        total_blocks, block_size: of its KV cache.
        step_tokens: what a step may hold.
    """
    limits = info.limits
    weights = "" if info.quantization == "none" else f", weights in {info.quantization},"
    _log.info(
        "model %s version %s: %s in %s%s on %s, attention %s, prompts of up to %d tokens, sequences of up to %d, "
        "KV cache of %d tokens in %d blocks, steps of up to %d tokens, %d of prompts beside streams",
        info.name,
        info.version,
        info.architecture,
        info.dtype,
        weights,
        info.device,
        info.attention_tier,
        limits.max_prompt_tokens,
        limits.max_sequence_tokens,
        total_blocks * block_size,
        total_blocks,
        step_tokens.most,
        step_tokens.beside_streams,
    )
    for key, value, effective, reason in _lowered(limits):
        if key in settings.given:
            _log.warning("model %s: %s is %d, but %d is in effect: %s", info.name, key, value, effective, reason)
    if total_blocks * block_size < limits.max_sequence_tokens:
        _log.warning(
            "model %s: the KV cache holds %d tokens, but a sequence may have %d (maxSeqLen): a request that may become "
            "longer than the cache is refused; raise kvCacheMemory or lower maxSeqLen",
            info.name,
            total_blocks * block_size,
            limits.max_sequence_tokens,
        )


def _lowered(limits: ModelLimits) -> Iterator[tuple[str, int, int, str]]:
    """Each limit that another one lowers: its key, its value, the one in effect, and why."""
    positions = f"the model was built for {limits.max_position_embeddings} positions"
    longest, prompt = limits.max_sequence_tokens, limits.max_prompt_tokens
    if longest < limits.max_seq_len:
        yield "maxSeqLen", limits.max_seq_len, longest, positions
    if prompt < limits.max_input_len:
        if prompt == limits.max_position_embeddings:
            reason = positions
        elif prompt == limits.max_seq_len - 1:
            reason = "maxSeqLen leaves no more"
        else:
            reason = "no prompt may be longer"
        yield "maxInputTokenLen", limits.max_input_len, prompt, reason
    # As much as a sequence is allowed, and means all that a prompt leaves.
    if limits.max_iter_times > longest:
        yield "maxIterTimes", limits.max_iter_times, longest - 1, positions
