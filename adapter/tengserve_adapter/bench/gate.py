"""Whether a server answers right, before it counts how fast: greedy answers and a reference, alone and all at once."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.load import Answer, Concurrency, answer, run_load
from tengserve_adapter.bench.requests import Prompt, Request
from tengserve_adapter.bench.workloads import Prompts
from tengserve_backend.errors import ConfigurationError, shown

OUTPUT_TOKENS: Final = 16
PROMPT_TOKENS: Final = (8, 17, 40, 100, 160, 300)
"""Lengths of the prompts that are asked; some beyond a block of the KV cache, and some beyond two."""
_SHORT_DTYPES: Final = ("bfloat16", "float16")
_LEAST_OF_SHORT: Final = 0.3
"""Rounding to 16 bits turns near ties over, and all that follows a turned one differs; docs/performance.md has what
servers gave."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer to a prompt.

    Attributes:
        prompt: what is asked.
        ids: of the answer; empty when only its text is known.
        text: of the answer.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Right answers.

    Attributes:
        made_by: who gave them.
        answers: one a prompt.
        dtype: that they were computed in; "" when that is not known.
    """

    made_by: str
    answers: tuple[Expected, ...]
    dtype: str = ""

    @property
    def least_agreement(self) -> float:
        """The least share of it that a right server gives."""
        return _LEAST_OF_SHORT if self.dtype in _SHORT_DTYPES else 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a server's answers are the reference's.

    Attributes:
        reference: who is right.
        agreement: of all tokens that were expected, alone and at once, the share before the first that differs; of the
            characters, where only texts can be compared.
        difference: the first difference in words; "" without one.
    """

    reference: str
    agreement: float
    difference: str


def gate_prompts(prompts: Prompts) -> list[Prompt]:
    """What is asked: always the same for a tokenizer."""
    return [prompts.prompt(tokens, f"gate/{tokens}") for tokens in PROMPT_TOKENS]


def read_reference(file: Path) -> Reference:
    """A reference from a file that `write_reference` wrote.

    Raises:
        ConfigurationError: it cannot be read or is none.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        answers = tuple(
            Expected(Prompt(row["prompt"], tuple(row["prompt_ids"])), tuple(row["ids"]), row["text"])
            for row in data["answers"]
        )
        # Files of earlier versions tell no dtype.
        return Reference(str(data["made_by"]), answers, str(data.get("dtype", "")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--reference must be a file that scripts/bench reference wrote, got {shown(str(file))!r} ({error})"
        ) from None


def write_reference(reference: Reference, file: Path) -> None:
    """Write a reference to a file."""
    rows = [
        {"prompt": one.prompt.text, "prompt_ids": one.prompt.ids, "ids": one.ids, "text": one.text}
        for one in reference.answers
    ]
    data = {"made_by": reference.made_by, "dtype": reference.dtype, "answers": rows}
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


async def own_answers(ask: Ask, name: str, prompts: Sequence[Prompt], *, timeout_s: float) -> Reference:
    """What a server answers when nobody else asks it, as a reference.

    Raises:
        ConfigurationError: it does not answer.
    """
    found = await _alone(ask, prompts, timeout_s)
    for one in found:
        if one.record.error:
            raise ConfigurationError(f"{name} gives no reference: {one.record.error}")
    answers = tuple(Expected(prompt, one.ids, one.text) for prompt, one in zip(prompts, found, strict=True))
    return Reference(f"{name} alone", answers)


async def check(ask: Ask, reference: Reference, *, timeout_s: float) -> Verdict:
    """Ask everything, one request after the other and then all at once, and compare."""
    prompts = [expected.prompt for expected in reference.answers]
    alone = await _alone(ask, prompts, timeout_s)
    at_once = await run_load(
        ask,
        [Request(prompt, OUTPUT_TOKENS) for prompt in prompts],
        Concurrency(len(prompts)),
        timeout_s=timeout_s,
        now=time.perf_counter,
        on_answer=lambda: None,
    )
    same = total = 0
    difference = ""
    for how, answers in (("alone", alone), ("at once", at_once)):
        for expected, found in zip(reference.answers, answers, strict=True):
            length, whole, words = _compare(expected, found)
            same += length
            total += whole
            if words and not difference:
                difference = f"a prompt of {len(expected.prompt.ids)} tokens, {how}: {words}"
    return Verdict(reference.made_by, same / max(1, total), difference)


async def _alone(ask: Ask, prompts: Sequence[Prompt], timeout_s: float) -> list[Answer]:
    return [
        await answer(ask, Request(prompt, OUTPUT_TOKENS), timeout_s=timeout_s, now=time.perf_counter)
        for prompt in prompts
    ]


def _compare(expected: Expected, found: Answer) -> tuple[int, int, str]:
    """Tokens or characters that are the same from the start, how many there should be, and the difference in words."""
    by_ids = bool(expected.ids and found.ids)
    right: Sequence[object] = expected.ids if by_ids else expected.text
    given: Sequence[object] = found.ids if by_ids else found.text
    if found.record.error:
        return 0, len(right), found.record.error
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(right, given, strict=False))
    same = sum(1 for _ in pairs)
    if same == len(right) == len(given):
        return same, len(right), ""
    if by_ids:
        at, instead = (str(side[same]) if same < len(side) else "the end" for side in (right, given))
        return same, len(right), f"token {same} of {len(right)} should be {at} and is {instead}"
    at, instead = (f"'{shown(side[same : same + 12])}'" if same < len(side) else "the end" for side in (right, given))
    return same, len(right), f"from character {same} of {len(right)} it should be {at} and is {instead}"
