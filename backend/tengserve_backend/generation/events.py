"""What the engine answers: one event a generated token, the last one with the end.

A request that ends otherwise (deadline, abort, failure) ends with an exception of `tengserve_backend.errors`
instead of an event with `finish`; there is always exactly one end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
class TokenEvent:
    """One generated token.

    Attributes:
        token_id: the id.
        text: what may be shown now that could not be before; "" while a character is incomplete or a stop string
            may be starting. The texts of all events, joined, are the answer: the same whether it is streamed or not.
        latency_ms: from submission for the first token, from the token before for the others.
        finish: set on the last event.
    """

    token_id: int
    text: str
    latency_ms: float
    finish: Finish | None = None
