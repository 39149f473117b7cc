"""Runs steps: packs them, calls the model once, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tengserve_backend.execution.attention.registry import StepContext, step_context
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.kv_tensors import PagedKVCache
from tengserve_backend.execution.packed_batch import PackedBatch, pack
from tengserve_backend.execution.sampler import SamplingRow, sample
from tengserve_backend.generation.sampling import ResolvedSampling
from tengserve_backend.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class _Member:
    """What the runner keeps of a sequence: enough to sample its next token, whatever happens to its blocks."""

    sampling: ResolvedSampling
    prompt_ids: Sequence[int]
    min_new_tokens: int
    output_ids: list[int] = field(default_factory=list)


class Runner:
    """One model and its cache. The engine's thread calls it.

    Args:
        model: a transformers causal language model whose attention is our registry function.
        cache: the pages; block numbers in steps are its own.
        tier: how attention is computed.
        device: where the model is.
        eos_ids: tokens that may not be chosen before a sequence's min_new_tokens.
    """

    def __init__(
        self,
        *,
        model: Any,
        cache: PagedKVCache,
        tier: AttentionTier,
        device: torch.device,
        eos_ids: Sequence[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._tier = tier
        self._device = device
        self._eos_ids = tuple(eos_ids)
        self._members: dict[int, _Member] = {}

    def admit(self, seq_id: int, *, prompt_ids: Sequence[int], sampling: ResolvedSampling, min_new_tokens: int) -> None:
        """Announce a sequence before the first step that has it."""
        self._members[seq_id] = _Member(sampling, prompt_ids, min_new_tokens)

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._members.pop(seq_id, None)

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[int, int | None]:
        """Compute a step.

        Returns:
            the next token id of each sequence whose part samples; None where the model gave no usable logits.
        """
        batch = pack(step, block_size=self._cache.block_size, device=self._device)
        logits = forward_packed(self._model, batch, self._cache, self._tier)
        rows = [self._sampling_row(seq_id) for seq_id in batch.sample_ids]
        tokens = sample(logits, rows) if rows else []
        chosen = dict(zip(batch.sample_ids, tokens, strict=True))
        for seq_id, token in chosen.items():
            if token is not None:
                self._members[seq_id].output_ids.append(token)
        return chosen

    def _sampling_row(self, seq_id: int) -> SamplingRow:
        member = self._members[seq_id]
        too_early = len(member.output_ids) < member.min_new_tokens
        return SamplingRow(
            sampling=member.sampling,
            prompt_ids=member.prompt_ids,
            output_ids=member.output_ids,
            banned_ids=self._eos_ids if too_early else (),
        )


def forward_packed(model: Any, batch: PackedBatch, cache: PagedKVCache, tier: AttentionTier) -> torch.Tensor:
    """One forward over a packed row.

    Returns:
        logits [R, vocabulary] of the rows that sample, in the model's dtype.
    """
    context = StepContext(batch=batch, cache=cache, tier=tier)
    with step_context(context):
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
        )
    logits: torch.Tensor = output.logits.squeeze(0)
    return logits
