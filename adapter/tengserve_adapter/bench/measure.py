"""Carries a plan out: the gate first, then every system in turn at every load, round by round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from tengserve_adapter.bench import gate
from tengserve_adapter.bench.figures import sample
from tengserve_adapter.bench.gate import Verdict
from tengserve_adapter.bench.load import Answer, Concurrency, Load, Rate, run_load
from tengserve_adapter.bench.plan import Plan, RateOf, Results, Run, System
from tengserve_adapter.bench.requests import Request
from tengserve_adapter.bench.workloads import Workload

_FEWEST: Final = 8
_A_CLIENT: Final = 4
_RATE_SECONDS: Final = 20.0
_MOST: Final = 10_000


class Progress(Protocol):
    """Told how far the measurement is."""

    def gate(self, system: str, verdict: Verdict, least: float) -> None:
        """A system was judged; it is measured when its agreement is no less than the least."""
        ...

    def begin(self, what: str, requests: int) -> None:
        """A run of so many requests begins."""
        ...

    def answered(self) -> None:
        """One of them has ended."""
        ...

    def end(self, run: Run | None) -> None:
        """The run is over; None when it was to warm up."""
        ...


class Measurement:
    """One plan being carried out.

    Args:
        plan: what to do.
        progress: told what happens.
        now: a monotonic clock in seconds, of the event loop's speed.
    """

    def __init__(self, plan: Plan, progress: Progress, now: Callable[[], float]) -> None:
        self._plan = plan
        self._progress = progress
        self._now = now
        self._runs: list[Run] = []

    async def run(self) -> Results:
        """Everything. A system that fails the gate is not measured."""
        verdicts = await self._verdicts()
        systems = [one for one in self._plan.systems if self._passed(verdicts[one.name])]
        for workload in self._plan.workloads if systems else ():
            await self._warm_up(workload, systems)
            for clients in self._plan.concurrency:
                await self._rounds(workload, Concurrency(clients), systems)
            for rate in self._plan.rates:
                per_second = rate.share * self._best(workload, systems[0]) if isinstance(rate, RateOf) else rate
                if per_second > 0:
                    key = f"{self._plan.seed}/{workload.name}/{rate}"
                    await self._rounds(workload, Rate(per_second, self._plan.arrivals, key), systems)
        return Results(verdicts, self._runs)

    def _passed(self, verdict: Verdict) -> bool:
        return verdict.agreement >= self._plan.agreement

    async def _verdicts(self) -> dict[str, Verdict]:
        plan = self._plan
        prompts = gate.gate_prompts(plan.prompts)
        reference = plan.reference
        verdicts = {}
        for system in plan.systems:
            own = reference
            if own is None or system.templated:
                own = await gate.own_answers(system.ask, system.name, prompts, timeout_s=plan.timeout_s)
            if reference is None and not system.templated:
                reference = own
            verdict = await gate.check(system.ask, own, timeout_s=plan.timeout_s)
            verdicts[system.name] = verdict
            self._progress.gate(system.name, verdict, plan.agreement)
        return verdicts

    async def _warm_up(self, workload: Workload, systems: list[System]) -> None:
        """What a server does once only, such as growing its memory, must not count."""
        clients = max(self._plan.concurrency, default=1)
        requests = self._plan.prompts.requests(workload, clients, f"{self._plan.seed}/{workload.name}/warm-up")
        for system in systems:
            await self._load(system, requests, Concurrency(clients), f"{workload.name}, warming up, {system.name}")
            self._progress.end(None)

    async def _rounds(self, workload: Workload, load: Load, systems: list[System]) -> None:
        plan = self._plan
        for number in range(1, plan.rounds + 1):
            key = f"{plan.seed}/{workload.name}/{load}/{number}"
            requests = plan.prompts.requests(workload, self._count(load), key)
            for system in systems:
                what = f"{workload.name} {load}, round {number} of {plan.rounds}, {system.name}"
                answers = await self._load(system, requests, load, what)
                records = [answer.record for answer in answers]
                figures = sample(records, plan.slo)
                self._runs.append(Run(system.name, workload.name, load, number, figures, records))
                self._progress.end(self._runs[-1])

    async def _load(self, system: System, requests: list[Request], load: Load, what: str) -> list[Answer]:
        self._progress.begin(what, len(requests))
        return await run_load(
            system.ask,
            requests,
            load,
            timeout_s=self._plan.timeout_s,
            now=self._now,
            on_answer=self._progress.answered,
        )

    def _count(self, load: Load) -> int:
        if self._plan.requests is not None:
            return self._plan.requests
        count = load.clients * _A_CLIENT if isinstance(load, Concurrency) else round(load.per_second * _RATE_SECONDS)
        return min(max(count, _FEWEST), _MOST)

    def _best(self, workload: Workload, first: System) -> float:
        """The most answers a second of the sweep; 0.0 without any."""
        found = (run for run in self._runs if run.system == first.name and run.workload == workload.name)
        return max((run.figures.requests_per_s for run in found if isinstance(run.load, Concurrency)), default=0.0)
