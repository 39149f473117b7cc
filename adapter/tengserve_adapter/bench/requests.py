"""What is asked and what comes back, whatever the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt as text and as token ids: a tokenizer makes exactly these ids of the text.

    Attributes:
        text: for dialects that send text.
        ids: for dialects that send ids; their number is the prompt's length.
    """

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request that is to be answered with exactly so many tokens.

    Attributes:
        prompt: what is sent.
        output_tokens: tokens to generate; an end-of-sequence token does not end the answer.
        counted: whether its latencies are among those that are reported. Its tokens always count.
    """

    prompt: Prompt
    output_tokens: int
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer.

    Attributes:
        text: what is new.
        ids: of the new tokens, in dialects that have them.
        whole: the whole text of the answer, where the last piece has it.
        input_tokens, output_tokens: the server's own counts, where a piece has them.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    whole: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def carries(self) -> bool:
        """Whether it brings something of the answer, and not only news about it."""
        return bool(self.text or self.ids)


def with_fields(own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a dialect sends, with a server's own fields in their place or beside them; one that is None is left out."""
    return {name: value for name, value in {**own, **fields}.items() if value is not None}


class AnswerError(Exception):
    """A request was not answered as it should have been; the text says how."""
