"""What the engine answers: one event a generated token, the last one with the end.

A request that ends otherwise (deadline, abort, failure) ends with an exception of `tengserve_backend.errors`
instead of an event with `finish`; there is always exactly one end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of 0, which JSON cannot say."""


class FinishReason(enum.Enum):
    """Why an answer is complete."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a complete answer.

    Attributes:
        reason: EOS wins over a stop string, and both win over the length limit reached by the same token.
        prompt_tokens, generated_tokens: counts of token ids; a final EOS token is counted.
        seed: the seed that was used, asked for or drawn.
    """

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model found a token, and what it found most probable in its place.

    Natural logarithms of the model's own distribution, before biases, penalties, temperature and filters. They are
    finite: nothing is below LOGPROB_FLOOR.

    Attributes:
        token_id: the token.
        logprob: of this token.
        rank: 1 for the most probable token; the number of more probable ones, plus 1.
        top: (token id, logprob) of the most probable tokens, as many as were asked for, descending.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class NextToken:
    """What a step of the model chose for a sequence.

    Attributes:
        token_id: the token.
        logprobs: of the token, when the request asked for them.
        prompt_logprobs: see TokenEvent.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    Attributes:
        token_id: the id.
        text: what may be shown now that could not be before; "" while a character is incomplete or a stop string
            may be starting. The texts of all events, joined, are the answer: the same whether it is streamed or not.
        latency_ms: from submission for the first token, from the token before for the others.
        finish: set on the last event.
        logprobs: of this token, when the request asked for them.
        prompt_logprobs: on the first event, when the request asked for them: one entry a token of the prompt, None
            for the first, which nothing comes before.
    """

    token_id: int
    text: str
    latency_ms: float
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
