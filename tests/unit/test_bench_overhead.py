"""What `scripts/bench overhead` makes of latencies and of answers."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    return importlib.import_module("_bench_overhead_figures")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    return importlib.import_module("_bench_overhead_client")


def test_sample_counts_answers_and_sorts_latencies(figures: ModuleType) -> None:
    assert figures.sample([0.004, 0.001, 0.002, 0.003], 2.0) == figures.Sample(2.0, 2.0, 4.0)


def test_summary_takes_the_median_of_each_figure(figures: ModuleType) -> None:
    samples = [figures.Sample(10.0, 1.0, 9.0), figures.Sample(30.0, 2.0, 7.0), figures.Sample(20.0, 6.0, 8.0)]
    assert figures.summary(samples) == figures.Sample(20.0, 2.0, 8.0)


def test_row_divides_ours_by_stock(figures: ModuleType) -> None:
    cells = figures.row(
        figures.Case("grpc", 16, 1), figures.Sample(1500.0, 0.5, 1.0), figures.Sample(1000.0, 1.0, 2.0)
    ).split("|")
    assert [cell.strip() for cell in cells[1:-1]] == [
        "grpc",
        "16",
        "1",
        "1500 / 1000",
        "1.50",
        "0.50 / 1.00",
        "0.50",
        "1.00 / 2.00",
    ]


_SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [_SIZED, _CHUNKED])
def test_a_body_is_there_with_its_last_byte_and_not_before(client: ModuleType, answer: bytes) -> None:
    assert client.body_of(bytearray(answer)) == b"hello"
    assert all(client.body_of(bytearray(answer[:end])) is None for end in range(len(answer)))


def test_an_answer_with_an_error_is_none(client: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"500.*oh no"):
        client.body_of(bytearray(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\n\r\noh no"))
