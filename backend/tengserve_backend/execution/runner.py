"""Runs steps: the model's forward, then the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tengserve_backend.execution.forward import ModelForward
from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.sampling.row import SamplingRow
from tengserve_backend.execution.sampling.sampler import sample
from tengserve_backend.generation.sampling import ResolvedSampling
from tengserve_backend.scheduling.step import Step


@dataclass(slots=True)
class _Member:
    """What the runner keeps of a sequence: enough to sample its next token, whatever happens to its blocks.

    Attributes:
        sampling: the parameters.
        history: its tokens, when these parameters have penalties.
        biases: added to its logits from the first token on.
        early_biases: the same before min_new_tokens, when the answer may not end.
        min_new_tokens: see GenerationRequest.
        generated: tokens so far.
    """

    sampling: ResolvedSampling
    history: TokenHistory | None
    biases: Mapping[int, float]
    early_biases: Mapping[int, float]
    min_new_tokens: int
    generated: int = 0

    def row(self) -> SamplingRow:
        """What its next token is to be sampled with."""
        too_early = self.generated < self.min_new_tokens
        return SamplingRow(self.sampling, self.generated, self.history, self.early_biases if too_early else self.biases)

    def push(self, token_id: int) -> None:
        """Its answer has one more token."""
        self.generated += 1
        if self.history is not None:
            self.history.push(token_id)


class Runner:
    """One model and the sequences that it is running. The engine's thread calls it.

    Args:
        forward: the model.
        eos_ids: tokens that may not be chosen before a sequence's min_new_tokens.
    """

    def __init__(self, *, forward: ModelForward, eos_ids: Sequence[int]) -> None:
        self._forward = forward
        self._forbidden_early = dict.fromkeys(eos_ids, -math.inf)
        self._members: dict[int, _Member] = {}

    def admit(self, seq_id: int, *, prompt_ids: Sequence[int], sampling: ResolvedSampling, min_new_tokens: int) -> None:
        """Announce a sequence before the first step that has it."""
        biases = dict(sampling.logit_bias)
        self._members[seq_id] = _Member(
            sampling=sampling,
            history=TokenHistory(prompt_ids) if sampling.has_penalties else None,
            biases=biases,
            early_biases=biases | self._forbidden_early,
            min_new_tokens=min_new_tokens,
        )

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
        tokens = sample(logits, [self._members[seq_id].row() for seq_id in sampled]) if sampled else []
        chosen = dict(zip(sampled, tokens, strict=True))
        for seq_id, token in chosen.items():
            if token is not None:
                self._members[seq_id].push(token)
        return chosen

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the model on nothing in particular; raises when it cannot run at all."""
        self._forward.probe()
