"""One parsed call of a generation dialect, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from tengserve_backend.generation import Finish, FinishReason, GenerationRequest, TokenEvent
from tengserve_backend.generation.body import Ignored

FINISH_REASONS: Final = {
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
}


class Reply(Protocol):
    """How a dialect writes one answer as JSON. One object serves one request, because a stream has a state."""

    def event(self, event: TokenEvent) -> bytes:
        """The JSON of the next stream event; called once for each token, in order."""
        ...

    def answer(self, text: str, finish: Finish) -> bytes:
        """The JSON of the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body.

    Attributes:
        request: for the engine.
        stream: answer with events.
        reply: writes the answer.
        ignored: fields that nobody knows.
    """

    request: GenerationRequest
    stream: bool
    reply: Reply
    ignored: Ignored
