"""The load and its figures against servers with known delays, in virtual time: every figure is known exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from support.bench_servers import Schedule, request, server, token, tokens
from support.virtual_time import run
from tengserve_adapter.bench import load as load_module
from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.figures import Sample, Slo, sample
from tengserve_adapter.bench.load import Answer, Arrivals, Concurrency, Load, Rate, run_load
from tengserve_adapter.bench.requests import AnswerError, Chunk, Request


def loaded(
    make: Callable[[], Ask], requests: Sequence[Request], load: Load, *, timeout_s: float = 100.0
) -> list[Answer]:
    async def main(now: Callable[[], float]) -> list[Answer]:
        return await run_load(make(), requests, load, timeout_s=timeout_s, now=now, on_answer=lambda: None)

    return run(main)


def figures(answers: Sequence[Answer]) -> Sample:
    return sample([answer.record for answer in answers], Slo(ttft=1.0))


def always(schedule: Schedule, at_once: int = 1000) -> Callable[[], Ask]:
    return lambda: server(lambda _: schedule, at_once=at_once)


def test_one_client() -> None:
    found = figures(loaded(always(tokens(0.5, 0.25, 0.75)), [request()] * 4, Concurrency(1)))
    # Each answer takes 1.5 s, one after the other.
    assert found.duration_s == pytest.approx(6.0)
    assert (found.ttft.p50, found.ttft.p99) == pytest.approx((0.5, 0.5))
    assert (found.itl.p50, found.itl.p99) == pytest.approx((0.25, 0.75))
    assert found.tpot.p50 == pytest.approx(0.5)
    assert found.e2e.p99 == pytest.approx(1.5)
    assert found.output_per_s == pytest.approx(12 / 6.0)
    assert found.input_per_s == pytest.approx(20 / 6.0)
    assert found.concurrency == pytest.approx(1.0)


def test_clients_send_their_next_request_when_they_have_their_answer() -> None:
    found = figures(loaded(always(tokens(0.5, 0.25, 0.75)), [request()] * 8, Concurrency(4)))
    assert found.duration_s == pytest.approx(3.0)
    assert found.output_per_s == pytest.approx(8.0)
    assert found.concurrency == pytest.approx(4.0)


def test_a_server_that_queues_shows_in_the_time_to_the_first_token() -> None:
    # One at a time: of two clients one always waits for the other's 1.5 s.
    found = figures(loaded(always(tokens(0.5, 0.25, 0.75), at_once=1), [request()] * 6, Concurrency(2)))
    assert found.duration_s == pytest.approx(9.0)
    assert found.ttft.least == pytest.approx(0.5)
    assert found.ttft.p50 == pytest.approx(2.0)
    assert found.tpot.p99 == pytest.approx(0.5)
    assert found.good_share == pytest.approx(1 / 6)


def test_requests_by_schedule_are_sent_whatever_the_server_does() -> None:
    # One a second, and each takes 1.5 s of a server that answers one at a time: the wait grows by half a second.
    answers = loaded(always(tokens(0.5, 1.0), at_once=1), [request(2)] * 5, Rate(1.0, Arrivals.FIXED, "k"))
    records = [answer.record for answer in answers]
    assert [record.sent - records[0].sent for record in records] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert [record.ttft for record in records] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])


def test_a_request_that_is_sent_late_counts_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_IN_FLIGHT", 1)
    answers = loaded(always(tokens(0.5, 1.0)), [request(2)] * 3, Rate(1.0, Arrivals.FIXED, "k"))
    assert [answer.record.ttft for answer in answers] == pytest.approx([0.5, 1.0, 1.5])


def test_poisson_arrivals_are_the_same_for_a_key_and_have_the_rate() -> None:
    offsets = list(itertools.islice(Rate(4.0, Arrivals.POISSON, "k").offsets(), 4001))
    assert offsets == list(itertools.islice(Rate(4.0, Arrivals.POISSON, "k").offsets(), 4001))
    assert offsets[:50] != list(itertools.islice(Rate(4.0, Arrivals.POISSON, "other").offsets(), 50))
    assert offsets[0] == 0.0
    assert offsets[-1] == pytest.approx(1000.0, rel=0.1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    # Of exponential gaps, 1 - 1/e are shorter than their mean.
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)


def test_pieces_that_carry_nothing_are_no_tokens_and_no_time() -> None:
    schedule = [(0.5, Chunk()), (0.5, token()), (0.25, Chunk()), (0.25, token()), (3.0, Chunk(output_tokens=2))]
    (answer,) = loaded(always(schedule), [request(2)], Concurrency(1))
    assert answer.record.ttft == pytest.approx(1.0)
    assert answer.record.gaps == pytest.approx([0.5])
    assert answer.record.e2e == pytest.approx(1.5)
    assert answer.record.output_tokens == 2


def test_the_server_s_counts_win_over_pieces() -> None:
    schedule = [(0.5, Chunk(text="two words")), (1.0, Chunk(text=" more", input_tokens=9, output_tokens=5))]
    (answer,) = loaded(always(schedule), [request(5)], Concurrency(1))
    assert (answer.record.input_tokens, answer.record.output_tokens) == (9, 5)
    assert answer.record.tpot == pytest.approx(1.0 / 4)
    assert answer.text == "two words more"


def test_without_counts_the_client_s_own_are_used() -> None:
    (answer,) = loaded(always(tokens(1.0, 1.0, 1.0)), [request(3, input_tokens=6)], Concurrency(1))
    assert (answer.record.input_tokens, answer.record.output_tokens) == (6, 3)
    assert answer.ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        ([], "the answer is empty"),
        ([(1.0, Chunk(output_tokens=3))], "the answer is empty"),
        ([(1.0, token()), (1.0, Chunk(output_tokens=2))], "the server counts 2 tokens and sent 1"),
        ([(1.0, token()), (200.0, token())], "the answer did not end within 100 s"),
    ],
)
def test_answers_that_are_not_whole_fail(schedule: Schedule, error: str) -> None:
    (answer,) = loaded(always(schedule), [request()], Concurrency(1))
    assert answer.record.error == error
    assert figures([answer]).failed == 1


def test_one_failure_leaves_the_others_alone() -> None:
    def make() -> Ask:
        numbers = itertools.count()

        def schedule(_: Request) -> Schedule:
            if next(numbers) == 1:
                raise AnswerError("the answer is a 503: full")
            return tokens(0.5, 0.5, 0.5)

        return server(schedule)

    found = figures(loaded(make, [request()] * 4, Concurrency(2)))
    assert (found.requests, found.failed, found.output_tokens) == (4, 1, 9)
