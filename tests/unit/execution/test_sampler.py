"""Choosing tokens from logits."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tengserve_backend.execution.rng import uniform
from tengserve_backend.execution.sampling import sums
from tengserve_backend.execution.sampling.draw import draw
from tengserve_backend.execution.sampling.filters import largest
from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.sampling.row import SamplingRow
from tengserve_backend.execution.sampling.sampler import distribution, sample
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
LARGE_VOCABULARY = 152_064


def row(
    sampling: ResolvedSampling,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    biases: Mapping[int, float] | None = None,
) -> SamplingRow:
    history = TokenHistory(prompt) if sampling.has_penalties else None
    if history is not None:
        for token in output:
            history.push(token)
    return SamplingRow(sampling, len(output), history, biases or {})


def choose(logits: torch.Tensor, *rows: SamplingRow) -> list[int | None]:
    return sample(logits, list(rows))


def random_logits(rows: int, vocabulary: int, *, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def by_transformers(
    logits: torch.Tensor, sampling: ResolvedSampling, context: Sequence[int], biases: Mapping[int, float] | None = None
) -> torch.Tensor:
    """Probabilities by transformers' own processors and warpers, in its order."""
    processors = LogitsProcessorList()
    if biases:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]))
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
    return processors(torch.tensor([list(context)]), logits[None].clone()).softmax(-1)[0]


EVERYTHING = {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2}
PARAMETERS: list[dict[str, Any]] = [
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
    EVERYTHING,
]


@pytest.mark.parametrize("changes", PARAMETERS, ids=str)
@pytest.mark.parametrize("biases", [{}, {0: -2.5, 4: 6.0}], ids=["unbiased", "biased"])
def test_probabilities_are_those_of_transformers(changes, biases):
    sampling = replace(SAMPLING, **changes)
    got = distribution(LOGITS, row(sampling, prompt=[0, 4], output=[2], biases=biases))
    expected = by_transformers(LOGITS, sampling, [0, 4, 2], biases)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_k": 64},
        {"top_k": 1000},
        {"top_k": 5000},
        {"top_k": 100_000},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"temperature": 0.3, "top_p": 0.9},
        {"min_p": 0.01},
        {"temperature": 0.7, "top_k": 1000, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 1.1},
        {"top_k": 5000, "top_p": 0.95},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [5000, LARGE_VOCABULARY])
def test_probabilities_over_large_vocabularies_are_those_of_transformers(changes, vocabulary):
    (logits,) = random_logits(1, vocabulary)
    sampling = replace(SAMPLING, **changes)
    sampling = replace(sampling, top_k=min(sampling.top_k, vocabulary - 1))
    got = distribution(logits, row(sampling, prompt=[7, 8], output=[9, 9]))
    expected = by_transformers(logits, sampling, [7, 8, 9, 9])
    # Either side finds the border of top_p in float32: tokens there may differ, whose probability is next to nothing.
    differing = (got > 0) != (expected > 0)
    assert float((got + expected)[differing].sum()) < 5e-5
    torch.testing.assert_close(got[~differing], expected[~differing], atol=1e-9, rtol=1e-4)


@pytest.mark.parametrize("changes", PARAMETERS, ids=str)
def test_draws_follow_the_distribution_of_transformers(changes):
    """Chi-squared at 4000 draws: one seed a draw, so the outcome is the same in every run."""
    draws = 4000
    sampling = replace(SAMPLING, **changes)
    rows = [row(replace(sampling, seed=seed), prompt=[0, 4], output=[2]) for seed in range(1, draws + 1)]
    counts = Counter(choose(LOGITS.repeat(draws, 1), *rows))
    distributed = by_transformers(LOGITS, sampling, [0, 4, 2])
    expected = {token: float(p) * draws for token, p in enumerate(distributed) if p > 0}
    assert set(counts) <= set(expected)
    chi_squared = sum((counts[token] - number) ** 2 / number for token, number in expected.items())
    assert chi_squared < 35.0  # 7 degrees of freedom: 1e-5


def test_draws_over_a_large_vocabulary_invert_the_exact_cumulative_distribution():
    count = 48
    logits = random_logits(count, LARGE_VOCABULARY)
    rows = [row(replace(SAMPLING, seed=seed, temperature=0.4 + seed / 24)) for seed in range(count)]
    for scores, asked, token in zip(logits, rows, choose(logits, *rows), strict=True):
        weights = np.exp((scores.double().numpy() - float(scores.max())) / asked.sampling.temperature)
        ends = np.cumsum(weights / weights.sum())
        number = uniform(asked.sampling.seed, 0)
        assert token is not None
        start = ends[token - 1] if token else 0.0
        assert start - 1e-6 <= number <= ends[token] + 1e-6


def test_greedy_takes_the_largest_whatever_else_is_set():
    assert choose(LOGITS[None], row(replace(GREEDY, temperature=9.0, top_k=3, top_p=0.1))) == [0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"top_p": 0.5}, {"presence_penalty": 1.0}], ids=str)
def test_logits_without_a_finite_maximum_give_no_token_and_spare_the_others(do_sample, changes):
    sampling = replace(GREEDY, do_sample=do_sample, **changes)
    logits = (LOGITS * 30).repeat(5, 1)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3, :] = -math.inf
    logits[4, 1:] = -math.inf
    assert choose(logits, *[row(sampling, output=[5])] * 5) == [0, None, None, None, 0]


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.9}], ids=str)
def test_equal_logits_stay_or_go_together(changes):
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 3.0, -2.0])
    kept = distribution(logits, row(replace(SAMPLING, **changes))) > 0
    assert kept.tolist() == [False, True, False, True, True, False]


def test_top_k_of_a_flat_row_keeps_all_and_top_p_agrees():
    logits = torch.zeros(5000)
    for changes in ({"top_k": 50}, {"top_p": 0.2}, {"top_k": 50, "top_p": 0.2}, {"top_k": 1000, "top_p": 0.999}):
        got = distribution(logits, row(replace(SAMPLING, **changes)))
        torch.testing.assert_close(got, torch.full((5000,), 1 / 5000))


def test_top_p_among_ties_beyond_the_looked_at_head():
    """500 of top_k's 5000 equal tokens are looked at; their mass must still count for top_p."""
    logits = torch.zeros(20_000)
    logits[:2] = math.log(4000.0)
    sampling = replace(SAMPLING, top_k=50, top_p=0.25)
    # The two weigh 4000 each, the others 19998 together: a quarter of all is reached by the two.
    assert int((distribution(logits, row(sampling)) > 0).sum()) == 2
    assert int((distribution(logits, row(replace(sampling, top_p=0.3))) > 0).sum()) == 20_000


def test_top_k_holds_at_any_temperature():
    """A high temperature makes all probabilities equal in float32; the k largest logits are still the same."""
    for temperature in (1e-45, 1e9, 1e300):
        rows = [row(replace(SAMPLING, seed=seed, temperature=temperature, top_k=3)) for seed in range(50)]
        assert set(choose(LOGITS.repeat(50, 1), *rows)) <= {0, 3, 6}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-45},
        {"temperature": 1e300},
        {"top_p": 1e-9},
        {"top_p": 1e-300},
        {"top_p": 1.0 - 1e-12},
        {"top_k": 1},
        {"min_p": 1.0},
        {"min_p": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"temperature": 1e-45, "top_p": 1e-9, "min_p": 1.0},
        {"temperature": 1e300, "top_k": 2, "top_p": 1e-9, "min_p": 1.0, "repetition_penalty": 1e300},
        {"presence_penalty": 1e30, "frequency_penalty": -1e30},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [8, 3000])
def test_extreme_parameters_still_choose_a_token(changes, vocabulary):
    logits = torch.full((1, vocabulary), -20.0)
    logits[0, :8] = LOGITS
    (token,) = choose(logits, row(replace(SAMPLING, **changes), prompt=[0, 5], output=[1]))
    assert token is not None
    assert 0 <= token < vocabulary


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


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 7), max_size=20),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    presence=st.sampled_from([0.0, -1.5, 0.5]),
    frequency=st.sampled_from([0.0, -0.25, 0.75]),
    biases=st.dictionaries(st.integers(0, 7), st.floats(-10, 10), max_size=4),
)
def test_adjusted_probabilities_equal_a_plain_computation(prompt, output, repetition, presence, frequency, biases):
    sampling = replace(SAMPLING, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    expected = []
    for token, logit in enumerate(LOGITS.tolist()):
        score = logit + biases.get(token, 0.0)
        if token in prompt or token in output:
            score = score * repetition if score < 0 else score / repetition
        expected.append(score - presence * (token in output) - frequency * output.count(token))
    got = distribution(LOGITS, row(sampling, prompt, output, biases))
    torch.testing.assert_close(got, torch.tensor(expected).softmax(-1), atol=1e-6, rtol=1e-4)


def test_tokens_that_the_model_reads_but_cannot_say_change_no_other_row():
    """Some models have more rows in their embedding than in their output."""
    sampling = replace(GREEDY, repetition_penalty=9.0, presence_penalty=50.0)
    strange = row(sampling, prompt=[511, 512, 600], output=[1024, 10**6], biases={520: 90.0})
    assert choose(LOGITS.repeat(3, 1), row(GREEDY), strange, row(replace(GREEDY, frequency_penalty=0.1))) == [0, 0, 0]


def test_a_top_k_wider_than_the_logits_keeps_all():
    # As of a model that reads more tokens than it has logits for.
    logits = torch.randn(1, 512, generator=torch.Generator().manual_seed(2))
    for top_p in (1.0, 0.9):
        wide, all_kept = (replace(SAMPLING, top_k=top_k, top_p=top_p) for top_k in (700, 0))
        assert sample(logits, [row(wide)]) == sample(logits, [row(all_kept)])


def test_an_end_of_minus_one_is_no_token_of_a_neighbour():
    # A row is a multiple of 512 wide, so the last token of the row before is right in front of the first one.
    logits = torch.zeros(2, 512)
    logits[:, -1] = 1.0
    assert sample(logits, [row(GREEDY, biases={3: 0.5}), row(GREEDY, biases={-1: -math.inf})]) == [511, 511]


def test_forbidden_tokens_are_not_chosen():
    forbidden = {0: -math.inf, 3: -math.inf}
    assert choose(LOGITS[None], row(GREEDY, biases=forbidden)) == [6]
    rows = [row(replace(SAMPLING, seed=seed, top_k=4), biases=forbidden) for seed in range(1, 200)]
    assert not {0, 3} & set(choose(LOGITS.repeat(199, 1), *rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_the_same_alone_and_among_others(dtype):
    chooser = random.Random(5)
    rows = []
    for n in range(40):
        sampling = replace(
            SAMPLING,
            seed=n,
            do_sample=n % 5 != 0,
            temperature=chooser.choice([0.3, 1.0, 2.0]),
            top_k=chooser.choice([0, 1, 40, 64, 900, 3000]),
            top_p=chooser.choice([1.0, 0.5, 0.9, 0.9999]),
            min_p=chooser.choice([0.0, 0.02]),
            repetition_penalty=chooser.choice([1.0, 1.3]),
        )
        rows.append(row(sampling, prompt=[n, 3], output=[n] * n, biases=chooser.choice([None, {n: 2.0}])))
    logits = random_logits(40, 20_011).to(dtype)
    before = logits.clone()
    together = choose(logits, *rows)
    assert together == [choose(logits[n : n + 1], rows[n])[0] for n in range(40)]
    order = list(range(40))
    chooser.shuffle(order)
    shuffled = choose(logits[order], *[rows[n] for n in order])
    assert shuffled == [together[n] for n in order]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("width", [1, 2, 297, 512, 1024])
def test_sums_have_the_same_bits_in_any_batch(width):
    values = torch.rand(16, 3, width)
    running = sums.running(values)
    torch.testing.assert_close(running.double(), values.double().cumsum(-1), rtol=1e-6, atol=0.0)
    assert torch.equal(running[5:6, 1:2], sums.running(values[5:6, 1:2]))
    if width & (width - 1) == 0:
        torch.testing.assert_close(sums.total(values).double(), values.double().sum(-1), rtol=1e-6, atol=0.0)
        assert torch.equal(sums.total(values)[5:6], sums.total(values[5:6]))


@pytest.mark.parametrize("count", [1, 64, 1024, 4096])
def test_the_largest_values_are_those_of_a_sort(count):
    values = torch.cat([random_logits(2, 16_384), random_logits(2, 16_384).round(), torch.zeros(1, 16_384)])
    values[0, 5:] = -math.inf
    assert torch.equal(largest(values, count), values.sort(descending=True).values[:, :count])


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-24, 1.0])
def test_a_token_without_weight_is_never_drawn(number):
    weights = torch.zeros(3, 2048)
    weights[0, 700] = 1e-30
    weights[1, [3, 1500]] = 1.0
    weights[2, 513:1023] = 0.1
    for tokens, kept in zip(draw(weights, torch.full((3, 1), number)).tolist(), weights > 0, strict=True):
        assert kept[tokens]


def test_the_logits_are_left_as_they_were():
    logits = LOGITS[None].clone()
    choose(logits, row(replace(SAMPLING, repetition_penalty=2.0), prompt=[0], biases={1: -math.inf}))
    assert torch.equal(logits, LOGITS[None])


def test_uniform_numbers_depend_on_seed_and_index_and_spread_evenly():
    numbers = [uniform(seed, index) for seed in (1, 2, 2**64 - 1) for index in range(1000)]
    assert len(set(numbers)) == 3000
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 3000 - 0.5) < 0.02
    assert uniform(7, 3) == uniform(7, 3)


@pytest.mark.parametrize("width", [8, 1000, 49_152, 50_257, 128_256, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_largest_logits_is_chosen(width, dtype):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-4, 5, (6, width), generator=generator).to(dtype)
    logits[1] = -3.0
    logits[2, -1] = logits[2, width // 2] = 9.0
    logits[3, width // 3] = math.nan
    logits[4] = -math.inf
    logits[5, 0] = math.inf
    expected = [int((each == each.max()).nonzero()[0, 0]) for each in (logits[0], logits[1], logits[2])]
    assert sample(logits, [row(GREEDY)] * 6) == [*expected, None, None, None]
    # As they lie behind a row that is none of theirs.
    assert sample(logits[::2], [row(GREEDY)] * 3) == [expected[0], expected[2], None]
