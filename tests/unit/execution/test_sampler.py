"""Choosing tokens from logits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tengserve_backend.execution.rng import uniform
from tengserve_backend.execution.sampler import SamplingRow, sample
from tengserve_backend.generation import ResolvedSampling

GREEDY = ResolvedSampling(
    do_sample=False,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=1,
)
SAMPLING = replace(GREEDY, do_sample=True)
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


def row(sampling: ResolvedSampling, prompt=(), output=(), banned=()) -> SamplingRow:
    return SamplingRow(sampling, prompt, output, banned)


def choose(logits: torch.Tensor, *rows: SamplingRow) -> list[int | None]:
    return sample(logits, list(rows))


def test_greedy_takes_the_largest_whatever_else_is_set():
    assert choose(LOGITS[None], row(replace(GREEDY, temperature=9.0, top_k=3, top_p=0.1))) == [0]


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_without_a_finite_maximum_give_no_token_and_spare_the_others(do_sample):
    sampling = replace(GREEDY, do_sample=do_sample, top_k=1)
    logits = LOGITS.repeat(4, 1)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3, :] = -math.inf
    assert choose(logits, *[row(sampling)] * 4) == [0, None, None, None]


def expected_distribution(sampling: ResolvedSampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """What transformers' own processors make of LOGITS, in its order."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(torch.tensor([prompt + output]), LOGITS[None].clone()).softmax(-1)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_transformers(changes):
    """Chi-squared at 4000 draws: one seed a draw, so the outcome is the same in every run."""
    draws = 4000
    rows = [row(replace(SAMPLING, seed=seed, **changes), prompt=[0, 4], output=[2]) for seed in range(1, draws + 1)]
    counts = Counter(choose(LOGITS.repeat(draws, 1), *rows))
    distribution = expected_distribution(SAMPLING if not changes else replace(SAMPLING, **changes), [0, 4], [2])
    expected = {token: float(p) * draws for token, p in enumerate(distribution) if p > 0}
    assert set(counts) <= set(expected)
    chi_squared = sum((counts[token] - number) ** 2 / number for token, number in expected.items())
    assert chi_squared < 35.0  # 7 degrees of freedom: 1e-5


def test_presence_and_frequency_look_at_the_output_only():
    logits = torch.zeros(1, 4)
    presence = replace(GREEDY, presence_penalty=2.0)
    assert choose(logits, row(presence, prompt=[0, 0])) == [0]
    assert choose(logits, row(presence, output=[0])) == [1]
    logits = torch.tensor([[1.0, 0.0]])
    frequency = replace(GREEDY, frequency_penalty=0.4)
    assert choose(logits, row(frequency, output=[0, 0])) == [0]
    assert choose(logits, row(frequency, output=[0, 0, 0])) == [1]


def test_a_negative_presence_penalty_draws_to_what_was_said():
    assert choose(torch.zeros(1, 4), row(replace(GREEDY, presence_penalty=-1.0), output=[2])) == [2]


def test_repetition_counts_the_prompt_and_works_on_both_signs():
    logits = torch.tensor([[1.0, 0.9, -1.0]])
    assert choose(logits, row(replace(GREEDY, repetition_penalty=1.5), prompt=[0])) == [1]
    logits = torch.tensor([[-1.0, -1.2]])
    assert choose(logits, row(replace(GREEDY, repetition_penalty=1.5), prompt=[0])) == [1]


def test_banned_tokens_are_not_chosen():
    assert choose(LOGITS[None], row(GREEDY, banned=[0])) == [3]
    seeds = [row(replace(SAMPLING, seed=seed), banned=[0, 3]) for seed in range(1, 200)]
    assert not {0, 3} & set(choose(LOGITS.repeat(199, 1), *seeds))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-45},
        {"temperature": 1e300},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"temperature": 1e-45, "top_p": 1e-9, "min_p": 1.0},
    ],
    ids=str,
)
def test_extreme_parameters_still_choose_a_token(changes):
    (token,) = choose(LOGITS[None], row(replace(SAMPLING, **changes), prompt=[0, 5], output=[1]))
    assert token is not None
    assert 0 <= token < 8


def test_a_row_is_the_same_alone_and_among_others():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 500, generator=generator) * 3
    rows = [
        row(replace(SAMPLING, seed=n, temperature=0.5 + n / 8, top_k=n * 7, top_p=0.99 - n / 40), output=[n] * n)
        for n in range(16)
    ]
    together = choose(logits, *rows)
    alone = [choose(logits[n : n + 1], rows[n])[0] for n in range(16)]
    assert together == alone


def test_the_logits_are_left_as_they_were():
    logits = LOGITS[None].clone()
    choose(logits, row(replace(SAMPLING, repetition_penalty=2.0), prompt=[0], banned=[1]))
    assert torch.equal(logits, LOGITS[None])


def test_uniform_numbers_depend_on_seed_and_index_and_spread_evenly():
    numbers = [uniform(seed, index) for seed in (1, 2, 2**64 - 1) for index in range(1000)]
    assert len(set(numbers)) == 3000
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 3000 - 0.5) < 0.02
    assert uniform(7, 3) == uniform(7, 3)
