"""The results as JSON, with everything that was seen, and as Markdown, with what one wants to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tengserve_adapter.bench import aisbench
from tengserve_adapter.bench.figures import Sample, Spread
from tengserve_adapter.bench.gate import Verdict
from tengserve_adapter.bench.load import Concurrency
from tengserve_adapter.bench.plan import Plan, Results, Run
from tengserve_adapter.bench.summary import Comparison, Row, comparisons, rows

_LATENCIES: Final = ("ttft", "itl", "tpot", "e2e")
_PERCENTILES: Final = ("p50", "p90", "p99")


def to_json(plan: Plan, results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, times in seconds.

    Args:
        plan: that was carried out.
        results: of it.
        about: the machine, the command and the versions.
    """
    found = rows(results.runs)
    return {
        **about,
        "slo": str(plan.slo),
        "seed": plan.seed,
        "rounds": plan.rounds,
        "least_agreement": plan.agreement,
        "systems": [
            {"name": one.name, "dialect": one.dialect, "url": one.url, "model": one.model}
            | dataclasses.asdict(results.verdicts[one.name])
            for one in plan.systems
        ],
        "rows": [_row(row) for row in found],
        "ratios": [dataclasses.asdict(one) for one in comparisons(found, plan.systems[0].name)],
        "runs": [_run(run) for run in results.runs],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "system": row.system,
        "workload": row.workload,
        "load": row.load,
        "valid": row.valid,
        "output_tokens_per_s": row.median(lambda one: one.output_per_s),
        "output_tokens_per_s_extremes": row.extremes(lambda one: one.output_per_s),
        "input_tokens_per_s": row.median(lambda one: one.input_per_s),
        "requests_per_s": row.median(lambda one: one.requests_per_s),
        "goodput_per_s": row.median(lambda one: one.goodput),
        "good_share": row.median(lambda one: one.good_share),
        **{kind: dict(zip(_PERCENTILES, _latency(row, kind), strict=True)) for kind in _LATENCIES},
    }


def _run(run: Run) -> dict[str, Any]:
    clients = run.load.clients if isinstance(run.load, Concurrency) else None
    began = min(record.sent for record in run.records)
    return {
        "system": run.system,
        "workload": run.workload,
        "load": str(run.load),
        "round": run.round,
        "valid": run.figures.valid,
        "figures": dataclasses.asdict(run.figures)
        | {
            "requests_per_s": run.figures.requests_per_s,
            "input_tokens_per_s": run.figures.input_per_s,
            "output_tokens_per_s": run.figures.output_per_s,
        },
        "aisbench": {
            "per_request": aisbench.per_request(run.records),
            "end_to_end": aisbench.end_to_end(run.figures, clients),
        },
        "requests": [
            {
                "sent": round(record.sent - began, 6),
                "arrivals": [round(at - began, 6) for at in record.arrivals],
                "input_tokens": record.input_tokens,
                "output_tokens": record.output_tokens,
                "error": record.error,
            }
            for record in run.records
        ],
    }


def to_markdown(plan: Plan, results: Results, about: Mapping[str, Any]) -> str:
    """The tables; times in milliseconds. Arguments as to_json's."""
    found = rows(results.runs)
    machine = about["machine"]
    parts = [
        "# Serving benchmark",
        f"`{about['command']}`",
        f"{machine['cpu']}, {machine['cores']} cores, load average {machine['load_average_before']} before and"
        f" {machine['load_average_after']} after; {plan.rounds} rounds, medians; good is: {plan.slo}.",
        _table(
            ("system", "version", "dialect", "model", "reference", "agreement", "first difference"),
            [
                (
                    one.name,
                    about["versions"].get(one.name, ""),
                    one.dialect,
                    one.model,
                    *_verdict(results.verdicts[one.name], plan.agreement),
                )
                for one in plan.systems
            ],
        ),
    ]
    if found:
        parts.append(_table(_COLUMNS, [_cells(row) for row in found]))
    if ratios := comparisons(found, plan.systems[0].name):
        parts.append(f"{plan.systems[0].name} to the others: medians of the ratios of each round.")
        parts.append(_table(_RATIOS, [_ratio(one) for one in ratios]))
    return "\n\n".join(parts) + "\n"


def _verdict(verdict: Verdict, least: float) -> tuple[str, str, str]:
    passed = "" if verdict.agreement >= least else " (not measured)"
    return verdict.reference, f"{verdict.agreement:.3f}{passed}", verdict.difference


_COLUMNS: Final = (
    "workload",
    "load",
    "system",
    "output tokens/s (least to most)",
    "input tokens/s",
    "requests/s",
    "TTFT p50 / p90 / p99",
    "ITL p50 / p90 / p99",
    "TPOT p50 / p90 / p99",
    "E2E p50 / p90 / p99",
    "good/s (share)",
)
_RATIOS: Final = ("workload", "load", "against", "output tokens/s", "of each round", "TTFT p50", "TPOT p50")


def _cells(row: Row) -> tuple[str, ...]:
    least, most = row.extremes(lambda one: one.output_per_s)
    void = "" if row.valid else " (void)"
    return (
        row.workload,
        row.load,
        row.system + void,
        f"{row.median(lambda one: one.output_per_s):.1f} ({least:.1f} to {most:.1f})",
        f"{row.median(lambda one: one.input_per_s):.1f}",
        f"{row.median(lambda one: one.requests_per_s):.2f}",
        *(" / ".join(f"{value * 1e3:.1f}" for value in _latency(row, kind)) for kind in _LATENCIES),
        f"{row.median(lambda one: one.goodput):.2f} ({row.median(lambda one: one.good_share):.0%})",
    )


def _latency(row: Row, kind: str) -> tuple[float, float, float]:
    """Medians of p50, p90 and p99, in seconds."""

    def spread(one: Sample) -> Spread:
        found: Spread = getattr(one, kind)
        return found

    return (
        row.median(lambda one: spread(one).p50),
        row.median(lambda one: spread(one).p90),
        row.median(lambda one: spread(one).p99),
    )


def _ratio(one: Comparison) -> tuple[str, ...]:
    rounds = ", ".join(f"{value:.2f}" for value in one.rounds)
    return (
        one.workload,
        one.load,
        one.other,
        f"{one.output_per_s:.2f}",
        rounds,
        f"{one.ttft:.2f}",
        f"{one.tpot:.2f}",
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, lines)])
