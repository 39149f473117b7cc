"""From recorded times to figures."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tengserve_adapter.bench.aisbench import end_to_end, per_request
from tengserve_adapter.bench.figures import Record, Slo, Spread, percentile, sample

# Sent at 10, tokens at 10.5, 10.75 and 11.5.
FIRST = Record(10.0, 11.5, (10.5, 10.75, 11.5), input_tokens=100, output_tokens=3, asked_tokens=3)
# Sent at 11, its four tokens in two pieces at 12 and 14.
SECOND = Record(11.0, 14.0, (12.0, 14.0), input_tokens=50, output_tokens=4, asked_tokens=4)
FAILED = Record(10.0, 10.25, (), input_tokens=7, output_tokens=0, asked_tokens=3, error="no")


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.5, 3.0), ([1.0, 2.0], 0.5, 1.0), ([1.0, 2.0, 3.0], 0.5, 2.0), ([1.0, 2.0], 0.99, 2.0)],
)
def test_percentile_is_a_value_of_the_list(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_spread_of_a_hundred() -> None:
    spread = Spread.of([float(value) for value in reversed(range(1, 101))])
    assert dataclasses.astuple(spread) == (100, 50.5, 1.0, 50.0, 75.0, 90.0, 99.0, 100.0)


def test_spread_of_nothing() -> None:
    assert dataclasses.astuple(Spread.of([])) == (0,) + (0.0,) * 7


def test_one_answer() -> None:
    assert FIRST.ttft == 0.5
    assert FIRST.gaps == [0.25, 0.75]
    assert FIRST.e2e == 1.5
    assert FIRST.tpot == 0.5


def test_tpot_is_by_tokens_and_gaps_are_by_pieces() -> None:
    assert SECOND.gaps == [2.0]
    assert SECOND.tpot == pytest.approx(2.0 / 3)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    one = Record(0.0, 1.0, (1.0,), input_tokens=1, output_tokens=1, asked_tokens=1)
    assert one.tpot is None
    assert sample([one], Slo()).tpot.count == 0


def test_a_run() -> None:
    figures = sample([FIRST, SECOND, FAILED], Slo(ttft=0.75))
    assert (figures.requests, figures.failed, figures.short) == (3, 1, 0)
    assert figures.duration_s == 4.0
    # Input and output apart, and nothing of what failed.
    assert (figures.input_tokens, figures.output_tokens) == (150, 7)
    assert figures.input_per_s == 37.5
    assert figures.output_per_s == 1.75
    assert figures.requests_per_s == 0.5
    assert (figures.ttft.p50, figures.ttft.p99) == (0.5, 1.0)
    assert (figures.itl.p50, figures.itl.p99, figures.itl.count) == (0.75, 2.0, 3)
    assert figures.tpot.p50 == 0.5
    assert (figures.e2e.p50, figures.e2e.p90) == (1.5, 3.0)
    assert figures.concurrency == 4.5 / 4.0
    # One of three was good, in four seconds.
    assert figures.goodput == 0.25
    assert figures.good_share == pytest.approx(1 / 3)
    assert not figures.valid


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft=0.5), 1),
        (Slo(ttft=0.49), 0),
        (Slo(tpot=0.5), 1),
        (Slo(e2e=3.0), 2),
        (Slo(ttft=1.0, tpot=0.5), 1),
    ],
)
def test_good_answers_keep_to_every_limit(slo: Slo, good: int) -> None:
    assert sample([FIRST, SECOND], slo).good_share == good / 2


def test_an_slo_says_itself() -> None:
    assert str(Slo(ttft=0.5, tpot=0.05)) == "TTFT 500 ms, TPOT 50 ms"
    assert str(Slo()) == "none"
    assert Slo().ttft == math.inf


def test_uncounted_answers_give_tokens_and_no_latencies() -> None:
    figures = sample([FIRST, dataclasses.replace(SECOND, counted=False)], Slo())
    assert figures.output_tokens == 7
    assert figures.ttft.count == figures.e2e.count == 1
    assert figures.good_share == 1.0


def test_answers_of_another_length_make_a_run_void() -> None:
    figures = sample([FIRST, dataclasses.replace(SECOND, asked_tokens=5)], Slo())
    assert (figures.short, figures.valid) == (1, False)
    assert sample([FIRST, SECOND], Slo()).valid


def test_aisbench_s_names_and_units() -> None:
    rows = per_request([FIRST, SECOND, FAILED])
    assert rows["TTFT"] == {
        "Average": 750.0,
        "Min": 500.0,
        "Max": 1000.0,
        "Median": 500.0,
        "P75": 1000.0,
        "P90": 1000.0,
        "P99": 1000.0,
        "N": 2,
    }
    assert list(rows) == [
        "E2EL",
        "TTFT",
        "TPOT",
        "ITL",
        "InputTokens",
        "OutputTokens",
        "OutputTokenThroughput",
        "PrefillTokenThroughput",
    ]
    assert rows["PrefillTokenThroughput"]["Max"] == 200.0
    assert rows["OutputTokenThroughput"]["Max"] == 2.0
    common = end_to_end(sample([FIRST, SECOND, FAILED], Slo()), 8)
    assert common == {
        "Benchmark Duration": 4000.0,
        "Total Requests": 3,
        "Failed Requests": 1,
        "Success Requests": 2,
        "Concurrency": 1.125,
        "Max Concurrency": 8,
        "Request Throughput": 0.5,
        "Total Input Tokens": 150,
        "Total Output Tokens": 7,
        "Input Token Throughput": 37.5,
        "Output Token Throughput": 1.75,
        "Total Token Throughput": 39.25,
    }
