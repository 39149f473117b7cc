"""How the next token is chosen: what a request asks for, and what that means for one model."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGIT_BIASES = 1024
"""A request biases no more tokens than this."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling as a request asks for it. The dialect has checked every bound.

    Attributes:
        do_sample: False is greedy decoding, whatever the other values are.
        temperature: above 0; divides the logits.
        top_k: keep the k most probable tokens; 0 keeps all; None takes the model's own default.
        top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
        min_p: in [0, 1]; drop tokens less probable than this share of the most probable one.
        repetition_penalty: above 0; applied to tokens of the prompt and of the output.
        presence_penalty, frequency_penalty: subtracted from tokens of the output only.
        logit_bias: (token id, bias) pairs; added to the logits before anything else, also in greedy decoding.
        seed: in [0, 2**64); None lets the engine draw one.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def resolve(self, *, default_top_k: int, vocab_size: int, drawn_seed: int) -> ResolvedSampling:
        """These parameters for one model.

        A top_k at or above the vocabulary means the whole vocabulary (MindIE native API, /infer: top_k).
        """
        top_k = default_top_k if self.top_k is None else self.top_k
        return ResolvedSampling(
            do_sample=self.do_sample,
            temperature=self.temperature,
            top_k=0 if top_k >= vocab_size else top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=drawn_seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling with nothing left to decide; fields as in SamplingParams, top_k 0 meaning no limit."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
