"""Runs steps: the model's forward, then the choice of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tengserve_backend.execution.forward import ModelForward
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
    """One model and the sequences that it is running. The engine's thread calls it.

    Args:
        forward: the model.
        eos_ids: tokens that may not be chosen before a sequence's min_new_tokens.
    """

    def __init__(self, *, forward: ModelForward, eos_ids: Sequence[int]) -> None:
        self._forward = forward
        self._eos_ids = tuple(eos_ids)
        self._members: dict[int, _Member] = {}

    def admit(self, seq_id: int, *, prompt_ids: Sequence[int], sampling: ResolvedSampling, min_new_tokens: int) -> None:
        """Announce a sequence before the first step that has it."""
        self._members[seq_id] = _Member(sampling, prompt_ids, min_new_tokens)

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._members.pop(seq_id, None)
        self._forward.release(seq_id)

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[int, int | None]:
        """Compute a step.

        Returns:
            the next token id of each sequence whose part samples; None where the model gave no usable logits.
        """
        logits = self._forward.run(step)
        sampled = [part.seq_id for part in step.sequences if part.samples]
        tokens = sample(logits, [self._sampling_row(seq_id) for seq_id in sampled]) if sampled else []
        chosen = dict(zip(sampled, tokens, strict=True))
        for seq_id, token in chosen.items():
            if token is not None:
                self._members[seq_id].output_ids.append(token)
        return chosen

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the model on nothing in particular; raises when it cannot run at all."""
        self._forward.probe()

    def _sampling_row(self, seq_id: int) -> SamplingRow:
        member = self._members[seq_id]
        too_early = len(member.output_ids) < member.min_new_tokens
        return SamplingRow(
            sampling=member.sampling,
            prompt_ids=member.prompt_ids,
            output_ids=member.output_ids,
            banned_ids=self._eos_ids if too_early else (),
        )
