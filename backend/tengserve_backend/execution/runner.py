"""Runs steps: the model's forward, then the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.execution.forward import ModelForward, compute
from tengserve_backend.execution.sampling.greedy import usable
from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.sampling.logprobs import PromptScores, token_logprobs
from tengserve_backend.execution.sampling.row import SamplingRow
from tengserve_backend.execution.sampling.sampler import Choice, Sampler
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.execution.step_profile import NoClock, Phase, StepClock
from tengserve_backend.generation.events import NextToken, TokenLogprobs
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
        logprobs: how many alternatives to report for each token, None to report nothing.
        prompt_scores: of the prompt, when the request asked for them, until its first token.
        generated: tokens so far.
    """

    sampling: ResolvedSampling
    history: TokenHistory | None
    biases: Mapping[int, float]
    early_biases: Mapping[int, float]
    min_new_tokens: int
    logprobs: int | None
    prompt_scores: PromptScores | None
    generated: int = 0

    @property
    def takes_maximum(self) -> bool:
        """Whether its next token is the one of its largest logit, as the model gives it."""
        return not (self.sampling.do_sample or self.history is not None or self._biases_now)

    @property
    def _biases_now(self) -> Mapping[int, float]:
        return self.early_biases if self.generated < self.min_new_tokens else self.biases

    def row(self) -> SamplingRow:
        """What its next token is to be sampled with."""
        return SamplingRow(self.sampling, self.generated, self.history, self._biases_now)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> NextToken:
        """Its answer has one more token, which is reported."""
        self.generated += 1
        if self.history is not None:
            self.history.push(token_id)
        prompt_scores, self.prompt_scores = self.prompt_scores, None
        return NextToken(token_id, logprobs, None if prompt_scores is None else prompt_scores.result())


class Runner:
    """One model and the sequences that it is running. The engine's thread calls it.

    Args:
        forward: the model.
        device: where it is.
        eos_ids: tokens that may not be chosen before a sequence's min_new_tokens.
        clock: told how each step goes.
    """

    def __init__(
        self, *, forward: ModelForward, device: DeviceBackend, eos_ids: Sequence[int], clock: StepClock | None = None
    ) -> None:
        self._forward = forward
        self._clock = clock or NoClock()
        self._device = device
        self._forbidden_early = dict.fromkeys(eos_ids, -math.inf)
        self._members: dict[int, _Member] = {}

    def admit(
        self,
        seq_id: int,
        *,
        prompt_ids: Sequence[int],
        sampling: ResolvedSampling,
        min_new_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Announce a sequence before the first step that has it; the arguments are as in GenerationRequest."""
        biases = dict(sampling.logit_bias)
        self._members[seq_id] = _Member(
            sampling=sampling,
            history=TokenHistory(prompt_ids) if sampling.has_penalties else None,
            biases=biases,
            early_biases=biases | self._forbidden_early,
            min_new_tokens=min_new_tokens,
            logprobs=logprobs,
            prompt_scores=None if prompt_logprobs is None else PromptScores(prompt_ids, prompt_logprobs),
        )

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._members.pop(seq_id, None)
        self._forward.release(seq_id)

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[int, NextToken | None]:
        """Compute a step: one copy up, the model, the choice of tokens, one read.

        When it raises, no sequence has moved on. Log probabilities, for those who asked, are read besides.

        Returns:
            the next token of each sequence whose part samples; None where the model gave no usable logits.
        """
        sampled = [part.seq_id for part in step.sequences if part.samples]
        members = [self._members[seq_id] for seq_id in sampled]
        snapshot = Snapshot()
        choose = self._choice(members, snapshot)
        computation = self._forward.prepare(step, snapshot)
        uploaded = snapshot.upload(self._device.upload)
        self._clock.mark(Phase.PREPARE)
        logits = computation(uploaded)
        self._clock.mark(Phase.FORWARD)
        for seq_id, prompt in logits.prompts.items():
            scores = self._members[seq_id].prompt_scores
            if scores is not None:
                scores.add(prompt.start, prompt.rows)
        if not sampled:
            return {}
        tokens = choose(logits.last, uploaded)
        logprobs = _logprobs(logits.last, tokens, [member.logprobs for member in members])
        chosen = {
            seq_id: None if token is None else member.push(token, logprobs.get(index))
            for index, (seq_id, member, token) in enumerate(zip(sampled, members, tokens, strict=True))
        }
        self._clock.mark(Phase.SAMPLE)
        return chosen

    def _choice(self, members: Sequence[_Member], snapshot: Snapshot) -> Choice:
        """How the next token of each is chosen; what that needs is added to the snapshot."""
        greedy = self._device.greedy
        if all(member.takes_maximum for member in members):
            return lambda logits, _: usable(greedy(logits).tolist())
        return Sampler(
            [member.row() for member in members],
            self._forward.logit_width,
            snapshot,
            self._device.upload,
            greedy,
            on_cpu=self._device.torch_device.type == "cpu",
        ).choose

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the model on nothing in particular; raises when it cannot run at all."""
        step = self._forward.probe_step()
        compute(self._forward, step, self._device.upload)
        for part in step.sequences:
            self._forward.release(part.seq_id)


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int | None], wanted: Sequence[int | None]
) -> Mapping[int, TokenLogprobs]:
    """Log probabilities of the tokens of those rows that want them, by row; rows that want as many go together."""
    found: dict[int, TokenLogprobs] = {}
    for top in {top for top in wanted if top is not None}:
        chosen = {index: token for index, token in enumerate(tokens) if wanted[index] == top and token is not None}
        rows = logits[torch.tensor(list(chosen), dtype=torch.int64, device=logits.device)]
        found.update(zip(chosen, token_logprobs(rows, list(chosen.values()), top), strict=True))
    return found
