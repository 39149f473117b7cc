"""One parsed call of a generation dialect, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
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

    def answer(self, events: Sequence[TokenEvent], finish: Finish) -> bytes:
        """The JSON of the whole answer, from all its events."""
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


def text_of(events: Sequence[TokenEvent]) -> str:
    """The text of an answer."""
    return "".join(event.text for event in events)
