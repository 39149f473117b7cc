"""What the person who waits sees."""

from __future__ import annotations

import io

from tengserve_adapter.bench.figures import Record, Slo, sample
from tengserve_adapter.bench.gate import Verdict
from tengserve_adapter.bench.load import Concurrency
from tengserve_adapter.bench.plan import Run
from tengserve_adapter.bench.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_of(*records: Record) -> Run:
    return Run("it", "chat", Concurrency(1), 1, sample(records, Slo()), records)


GOOD = Record(0.0, 1.0, (0.5, 1.0), input_tokens=1, output_tokens=2, asked_tokens=2)
BAD = Record(0.0, 1.0, (), input_tokens=1, output_tokens=0, asked_tokens=2, error="full")


def test_a_bar_moves_on_a_terminal() -> None:
    screen, now = Terminal(), 100.0
    bar = ProgressBar(screen, lambda: now)
    bar.begin("chat c1", 4)
    for _ in range(3):
        now += 2.0
        bar.answered()
    drawn = screen.getvalue().split("\r\x1b[K")
    assert drawn[1] == f"chat c1 [{' ' * 24}] 0/4"
    assert drawn[4] == f"chat c1 [{'#' * 18}{' ' * 6}] 3/4, 2 s left"


def test_a_bar_is_not_drawn_for_every_answer() -> None:
    screen = Terminal()
    bar = ProgressBar(screen, lambda: 100.0)
    bar.begin("chat c1", 1000)
    for _ in range(1000):
        bar.answered()
    assert screen.getvalue().count("chat c1") == 1


def test_elsewhere_a_line_a_run_is_printed() -> None:
    paper = io.StringIO()
    bar = ProgressBar(paper)
    bar.gate("it", Verdict("plain", 0.5, "token 3"), 0.5)
    bar.begin("chat c1", 1)
    bar.answered()
    bar.end(run_of(GOOD))
    bar.end(None)
    bar.end(run_of(GOOD, BAD, BAD))
    assert paper.getvalue().splitlines() == [
        "it answers as the reference, plain: agreement 0.500 (at least 0.5 is wanted)",
        "  the first difference: token 3",
        "chat c1: 2.0 tokens/s out, TTFT p50 500.0 ms, TPOT p50 500.0 ms",
        "chat c1: 2.0 tokens/s out, TTFT p50 500.0 ms, TPOT p50 500.0 ms; void: 2 failed, 0 of another length",
        "  full",
    ]


def test_a_server_that_is_refused_is_told_how_it_can_be_measured() -> None:
    paper = io.StringIO()
    ProgressBar(paper).gate("it", Verdict("plain", 0.9479, "token 3"), 1.0)
    assert paper.getvalue().splitlines() == [
        "it is not measured: it differs from the reference, plain: agreement 0.948 (at least 1 is wanted)",
        "  the first difference: token 3",
        "  --agreement 0.94 measures it all the same; with dtype float32, of the server and of the reference, a right"
        " one gives all",
    ]
