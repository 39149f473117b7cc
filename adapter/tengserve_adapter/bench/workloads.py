"""What is asked: shapes of requests, and prompts of exactly so many tokens, the same for everybody who asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tengserve_adapter.bench.requests import Prompt, Request
from tengserve_backend.errors import ConfigurationError

Encode = Callable[[str], list[int]]
"""Token ids of a text, as the server makes them."""

_TEXT: Final = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education good new first last long great little own other old big high different small
large next early young important few public bad same able find give tell feel become leave put mean keep let begin
seem help show hear play run move live believe hold bring happen write provide sit stand lose pay meet include
continue set learn lead understand watch follow stop create speak read allow add spend grow open walk win offer
remember love consider appear buy wait serve die send expect build stay fall cut reach kill remain
"""
_WORDS: Final = tuple(_TEXT.split())
"""Common words, each of which most vocabularies have as one token."""

_MAX_TRIES: Final = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of one request.

    Attributes:
        input_tokens: of its own part of the prompt.
        output_tokens: that it asks for.
        counted: see Request.
    """

    input_tokens: int
    output_tokens: int
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load.

    Attributes:
        name: for the command line.
        what: one sentence.
        shapes: lengths of one request after the other, without end, the same for the same generator.
        shared_tokens: tokens with which all prompts of a run begin.
    """

    name: str
    what: str
    shapes: Callable[[random.Random], Iterator[Shape]]
    shared_tokens: int = 0


def _fixed(input_tokens: int, output_tokens: int) -> Callable[[random.Random], Iterator[Shape]]:
    def shapes(_: random.Random) -> Iterator[Shape]:
        while True:
            yield Shape(input_tokens, output_tokens)

    return shapes


def _mixed(generator: random.Random) -> Iterator[Shape]:
    """Lengths as in collections of real chats: many short, few long, both spread like a lognormal distribution."""
    while True:
        input_tokens = round(generator.lognormvariate(4.6, 1.0))
        output_tokens = round(generator.lognormvariate(4.2, 0.8))
        yield Shape(min(max(input_tokens, 8), 1024), min(max(output_tokens, 4), 256))


_STREAMS_TO_ONE_LONG: Final = 8


def _injected(_: random.Random) -> Iterator[Shape]:
    while True:
        for _number in range(_STREAMS_TO_ONE_LONG):
            yield Shape(16, 128)
        yield Shape(1500, 4, counted=False)


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("chat", "64 tokens in, 64 out", _fixed(64, 64)),
        Workload("prefill-512", "512 tokens in, 16 out", _fixed(512, 16)),
        Workload("prefill-1024", "1024 tokens in, 16 out", _fixed(1024, 16)),
        Workload("decode-128", "16 tokens in, 128 out", _fixed(16, 128)),
        Workload("decode-256", "16 tokens in, 256 out", _fixed(16, 256)),
        Workload("mixed", "8 to 1024 tokens in, 4 to 256 out, most of them short", _mixed),
        Workload("shared-prefix", "64 tokens in after 512 that all share, 64 out", _fixed(64, 64), shared_tokens=512),
        Workload(
            "injected",
            "16 tokens in, 128 out; after every eighth a prompt of 1500, whose own latency is not counted",
            _injected,
        ),
    )
}


class Prompts:
    """Makes prompts of English words, of exactly as many tokens as asked for.

    Args:
        encode: the model's tokenizer.

    Raises:
        ConfigurationError: the tokenizer has too few of our words as single tokens.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        empty = len(encode("The"))
        self._words = [word for word in _WORDS if len(encode(f"The {word}")) == empty + 1]
        if len(self._words) < 16:
            raise ConfigurationError(
                f"--tokenizer has only {len(self._words)} of {len(_WORDS)} common English words as single tokens;"
                " prompts of known length take at least 16"
            )

    def prompt(self, tokens: int, key: str, beginning: str = "") -> Prompt:
        """A prompt.

        Args:
            tokens: its length, the tokens of the beginning included.
            key: equal keys give equal prompts; others differ in nearly every word.
            beginning: the text that it begins with.

        Raises:
            ConfigurationError: no text of this length was found.
        """
        generator = random.Random(key)
        words = [beginning or "The"]
        missing = tokens - len(self._encode(words[0]))
        for _ in range(_MAX_TRIES):
            if missing > 0:
                words += generator.choices(self._words, k=missing)
            elif missing < 0:
                words = words[:missing] or words[:1]
            text = " ".join(words)
            ids = self._encode(text)
            missing = tokens - len(ids)
            if missing == 0:
                return Prompt(text, tuple(ids))
        raise ConfigurationError(f"--tokenizer makes no prompt of exactly {tokens} tokens of common English words")

    def requests(self, workload: Workload, count: int, key: str) -> list[Request]:
        """Requests of a workload; equal keys give equal requests."""
        generator = random.Random(key)
        beginning = ""
        if workload.shared_tokens:
            beginning = self.prompt(workload.shared_tokens, f"{key}/shared").text
        found = []
        for number, shape in zip(range(count), workload.shapes(generator), strict=False):
            tokens = workload.shared_tokens + shape.input_tokens
            prompt = self.prompt(tokens, f"{key}/{number}", beginning)
            found.append(Request(prompt, shape.output_tokens, shape.counted))
        return found
