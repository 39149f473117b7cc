"""From runs to rows: medians of the rounds, and how the first system compares with each other one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tengserve_adapter.bench.figures import Sample
from tengserve_adapter.bench.plan import Run

Figure = Callable[[Sample], float]


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one load.

    Attributes:
        system, workload, load: which.
        samples: one a round.
    """

    system: str
    workload: str
    load: str
    samples: Sequence[Sample]

    @property
    def valid(self) -> bool:
        """Whether the row counts: every answer of every round was whole and as long as asked."""
        return all(sample.valid for sample in self.samples)

    def median(self, figure: Figure) -> float:
        """A figure's median of the rounds."""
        return statistics.median(map(figure, self.samples))

    def extremes(self, figure: Figure) -> tuple[float, float]:
        """A figure's least and greatest value of the rounds."""
        values = [figure(sample) for sample in self.samples]
        return min(values), max(values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first system and another one at the same load: the medians of the ratios of each round, first to other.

    Attributes:
        other: the name of the other system.
        workload, load: at which.
        output_per_s: more is better for the first.
        ttft, tpot: of the p50; less is better for the first. 0.0 where there is no such latency.
        rounds: the throughput's ratio in each.
    """

    other: str
    workload: str
    load: str
    output_per_s: float
    ttft: float
    tpot: float
    rounds: tuple[float, ...]


def rows(runs: Sequence[Run]) -> list[Row]:
    """One row a system, workload and load, in the order in which they were measured first."""
    found: dict[tuple[str, str, str], list[Sample]] = {}
    for run in runs:
        found.setdefault((run.workload, str(run.load), run.system), []).append(run.figures)
    return [Row(system, workload, load, samples) for (workload, load, system), samples in found.items()]


def comparisons(all_rows: Sequence[Row], first: str) -> list[Comparison]:
    """The first system with each other one, where both rows count."""
    ours = {(row.workload, row.load): row for row in all_rows if row.system == first and row.valid}
    found = []
    for row in all_rows:
        own = ours.get((row.workload, row.load))
        if row.system == first or own is None or not row.valid:
            continue
        pairs = list(zip(own.samples, row.samples, strict=True))
        throughput = tuple(_ratio(one.output_per_s, other.output_per_s) for one, other in pairs)
        found.append(
            Comparison(
                other=row.system,
                workload=row.workload,
                load=row.load,
                output_per_s=statistics.median(throughput),
                ttft=statistics.median(_ratio(one.ttft.p50, other.ttft.p50) for one, other in pairs),
                tpot=statistics.median(_ratio(one.tpot.p50, other.tpot.p50) for one, other in pairs),
                rounds=throughput,
            )
        )
    return found


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else 0.0
