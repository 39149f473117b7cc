"""What is measured, in which order, and what was found: all of it data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.figures import Record, Sample, Slo
from tengserve_adapter.bench.gate import Reference, Verdict
from tengserve_adapter.bench.load import Arrivals, Load
from tengserve_adapter.bench.workloads import Prompts, Workload


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class System:
    """A server that is measured.

    Attributes:
        name: for the tables.
        dialect: its name.
        url: where it is.
        model: that is asked.
        ask: how it is asked.
        templated: see HttpDialect; its answers can then only be compared with its own.
        close: gives back what asking holds; called once, at the end.
    """

    name: str
    dialect: str
    url: str
    model: str
    ask: Ask
    templated: bool = False
    close: Callable[[], Awaitable[None]] = _nothing


@dataclass(frozen=True, slots=True)
class RateOf:
    """A rate that is a share of the first system's best one in the sweep of the same workload."""

    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        systems: measured in turns; the first is what the others are compared with.
        workloads, concurrency, rates: every workload with every load, concurrency first; requests a second.
        arrivals: of requests by rate.
        rounds: how often each is measured; the tables have medians.
        requests: of a run; None sends four a client, and by rate what arrives in 20 s, and never fewer than eight.
        slo: what is a good answer.
        seed: of prompts and arrivals.
        timeout_s: of one request.
        agreement: the least share of the reference that a system must give to be measured.
        reference: right answers; None compares with the first system, asked alone.
        prompts: makes them.
    """

    systems: Sequence[System]
    workloads: Sequence[Workload]
    concurrency: Sequence[int]
    rates: Sequence[float | RateOf]
    arrivals: Arrivals
    rounds: int
    requests: int | None
    slo: Slo
    seed: int
    timeout_s: float
    agreement: float
    reference: Reference | None
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement.

    Attributes:
        system: its name.
        workload: its name.
        load: how requests were sent.
        round: from 1.
        figures: of it.
        records: of each request.
    """

    system: str
    workload: str
    load: Load
    round: int
    figures: Sample
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Results:
    """All that was found.

    Attributes:
        verdicts: by system.
        runs: in the order in which they were made.
    """

    verdicts: dict[str, Verdict]
    runs: Sequence[Run]
