"""The same figures under the names of AISBench, MindIE's benchmark tool: its users know them.

Names and units are those of its page about performance results: milliseconds, tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from tengserve_adapter.bench.figures import Record, Sample, Spread


def per_request(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """The first of its tables: each quantity of a single request over all answered requests."""
    answered = [record for record in records if not record.error]
    tpots = [record.tpot for record in answered]
    columns: dict[str, list[float]] = {
        "E2EL": [record.e2e * 1e3 for record in answered],
        "TTFT": [record.ttft * 1e3 for record in answered],
        "TPOT": [tpot * 1e3 for tpot in tpots if tpot is not None],
        "ITL": [gap * 1e3 for record in answered for gap in record.gaps],
        "InputTokens": [record.input_tokens for record in answered],
        "OutputTokens": [record.output_tokens for record in answered],
        "OutputTokenThroughput": [record.output_tokens / record.e2e for record in answered if record.e2e > 0],
        "PrefillTokenThroughput": [record.input_tokens / record.ttft for record in answered if record.ttft > 0],
    }
    return {name: _row(Spread.of(values)) for name, values in columns.items()}


def end_to_end(figures: Sample, max_concurrency: int | None) -> dict[str, float | None]:
    """The second of its tables.

    Args:
        figures: of a run.
        max_concurrency: requests that could be sent at once; None where they came by a schedule.
    """
    return {
        "Benchmark Duration": figures.duration_s * 1e3,
        "Total Requests": figures.requests,
        "Failed Requests": figures.failed,
        "Success Requests": figures.requests - figures.failed,
        "Concurrency": figures.concurrency,
        "Max Concurrency": max_concurrency,
        "Request Throughput": figures.requests_per_s,
        "Total Input Tokens": figures.input_tokens,
        "Total Output Tokens": figures.output_tokens,
        "Input Token Throughput": figures.input_per_s,
        "Output Token Throughput": figures.output_per_s,
        "Total Token Throughput": figures.input_per_s + figures.output_per_s,
    }


def _row(spread: Spread) -> dict[str, float]:
    return {
        "Average": spread.mean,
        "Min": spread.least,
        "Max": spread.most,
        "Median": spread.p50,
        "P75": spread.p75,
        "P90": spread.p90,
        "P99": spread.p99,
        "N": spread.count,
    }
