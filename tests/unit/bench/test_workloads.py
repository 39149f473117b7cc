"""Prompts of exact length, the same for everybody who asks."""

from __future__ import annotations

import itertools
import random

import pytest

from tengserve_adapter.bench.workloads import WORKLOADS, Prompts
from tengserve_backend.errors import ConfigurationError


def by_words(text: str) -> list[int]:
    """A token a word, after a beginning as llama's tokenizers have it."""
    return [1, *(2 + sum(word.encode()) for word in text.split())]


def by_letters(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(by_words)


@pytest.mark.parametrize("tokens", [2, 3, 17, 64, 1024])
def test_a_prompt_has_as_many_tokens_as_asked_for_and_its_text_makes_them(prompts: Prompts, tokens: int) -> None:
    prompt = prompts.prompt(tokens, "k")
    assert len(prompt.ids) == tokens
    assert by_words(prompt.text) == list(prompt.ids)


def test_prompts_are_the_same_for_a_key_and_else_differ(prompts: Prompts) -> None:
    assert prompts.prompt(64, "k") == prompts.prompt(64, "k")
    one, other = prompts.prompt(64, "k"), prompts.prompt(64, "l")
    assert sum(a == b for a, b in zip(one.ids, other.ids, strict=True)) < 16


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("chat", (64, 64)),
        ("prefill-512", (512, 16)),
        ("prefill-1024", (1024, 16)),
        ("decode-128", (16, 128)),
        ("decode-256", (16, 256)),
        ("shared-prefix", (576, 64)),
    ],
)
def test_fixed_lengths(prompts: Prompts, name: str, lengths: tuple[int, int]) -> None:
    requests = prompts.requests(WORKLOADS[name], 3, "k")
    assert [(len(one.prompt.ids), one.output_tokens) for one in requests] == [lengths] * 3
    assert len({one.prompt for one in requests}) == 3


def test_a_shared_prefix_is_shared_within_a_run_only(prompts: Prompts) -> None:
    first, second = prompts.requests(WORKLOADS["shared-prefix"], 2, "k")
    (other,) = prompts.requests(WORKLOADS["shared-prefix"], 1, "l")
    assert first.prompt.ids[:512] == second.prompt.ids[:512]
    assert first.prompt.ids[512:] != second.prompt.ids[512:]
    assert first.prompt.ids[:512] != other.prompt.ids[:512]


def test_a_long_prompt_comes_after_every_eighth_and_its_latency_is_not_counted(prompts: Prompts) -> None:
    requests = prompts.requests(WORKLOADS["injected"], 18, "k")
    long = [index for index, one in enumerate(requests) if len(one.prompt.ids) == 1500]
    assert long == [8, 17]
    assert [index for index, one in enumerate(requests) if not one.counted] == long


def test_mixed_lengths_are_mostly_short_and_within_bounds() -> None:
    shapes = list(itertools.islice(WORKLOADS["mixed"].shapes(random.Random(1)), 2000))
    assert all(8 <= one.input_tokens <= 1024 and 4 <= one.output_tokens <= 256 for one in shapes)
    inputs = sorted(one.input_tokens for one in shapes)
    assert 80 <= inputs[1000] <= 125
    assert inputs[1900] > 400
    assert len({one.output_tokens for one in shapes}) > 100


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--tokenizer has only 0 of"):
        Prompts(by_letters)


def test_a_length_that_cannot_be_had_is_refused(prompts: Prompts) -> None:
    with pytest.raises(ConfigurationError, match="no prompt of exactly 1 tokens"):
        prompts.prompt(1, "k")
