"""One request's text and its end: the only place that decides why an answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tengserve_backend.generation import FinishReason, GenerationRequest
from tengserve_backend.text.detokenizer import IncrementalDetokenizer
from tengserve_backend.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Progressed:
    """What one token did: the text that may be shown now, and the end if this was it."""

    text: str
    reason: FinishReason | None


class Answer:
    """Takes the tokens of one request, in order.

    Args:
        request: its stop strings and switches count here.
        decode: text of a list of token ids.
        eos_ids: tokens that end an answer.
        max_tokens: the resolved length limit, at least 1.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self._min_tokens = request.min_new_tokens
        self._eos_ids = frozenset() if request.ignore_eos else eos_ids
        self._max_tokens = max_tokens
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stops = StopMatcher(request.stop)
        self.generated_tokens = 0

    def push(self, token_id: int) -> Progressed:
        """Take a token. The order of the tests is the rule: EOS, then stop string, then length.

        An EOS token is counted and leaves no text. Up to min_new_tokens no stop string is looked for.
        """
        self.generated_tokens += 1
        if token_id in self._eos_ids and self.generated_tokens > self._min_tokens:
            return self._end(self._detokenizer.flush(), FinishReason.EOS)
        text = self._detokenizer.push(token_id)
        if self.generated_tokens >= self._max_tokens:
            return self._end(text + self._detokenizer.flush(), FinishReason.LENGTH)
        if self.generated_tokens <= self._min_tokens:
            return Progressed(text, None)
        stopped = self._stops.push(text)
        return Progressed(stopped.text, FinishReason.STOP if stopped.matched else None)

    def _end(self, text: str, reason: FinishReason) -> Progressed:
        """The last text may still complete a stop string, which is then the better reason than the length."""
        stopped = self._stops.push(text)
        if stopped.matched:
            return Progressed(stopped.text, reason if reason is FinishReason.EOS else FinishReason.STOP)
        return Progressed(stopped.text + self._stops.flush(), reason)
