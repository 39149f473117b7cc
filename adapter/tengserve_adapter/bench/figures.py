"""From the times of answers to figures. Nothing here looks at a clock.

Definitions, all in seconds:

- TTFT: from sending to the first piece that carries a token or text.
- ITL: between one such piece and the next of the same answer.
- E2E: from sending to the last such piece.
- TPOT: (E2E - TTFT) / (output tokens - 1), for answers of two tokens and more.

They are AISBench's definitions too. A request that arrives by a schedule counts as sent when it was due, however late
the client or the server was.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One request and its answer; times in seconds of one clock.

    Attributes:
        sent, ended: of the request and of its answer.
        arrivals: when each piece came that carried something.
        input_tokens, output_tokens: as the server counts where it does, else as the client does.
        asked_tokens: output tokens that were asked for.
        counted: see Request.
        error: what went wrong; "" for an answer.
    """

    sent: float
    ended: float
    arrivals: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    asked_tokens: int
    counted: bool = True
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """Time of the whole answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None when there is no second."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Each time between one piece and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are distributed. Percentiles are values that occurred (nearest rank); all are 0 without values."""

    count: int
    mean: float
    least: float
    p50: float
    p75: float
    p90: float
    p99: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of some values, in any order."""
        if not values:
            return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        return Spread(
            count=len(ordered),
            mean=statistics.fmean(ordered),
            least=ordered[0],
            p50=percentile(ordered, 0.5),
            p75=percentile(ordered, 0.75),
            p90=percentile(ordered, 0.9),
            p99=percentile(ordered, 0.99),
            most=ordered[-1],
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all are not above (nearest rank).

    Args:
        ordered: values in ascending order, at least one.
        share: in (0, 1].
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer must keep to be good, in seconds; infinite where nothing is asked."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    def met_by(self, record: Record) -> bool:
        """Whether an answer is good."""
        tpot = record.tpot or 0.0
        return record.ttft <= self.ttft and tpot <= self.tpot and record.e2e <= self.e2e

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft), ("TPOT", self.tpot), ("E2E", self.e2e))
        return ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in limits if limit < math.inf) or "none"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a load against one server.

    Attributes:
        requests: that were sent.
        failed: of these, those without a whole answer.
        short: of these, those with another number of tokens than was asked for.
        duration_s: from the first that was sent to the end of the last.
        input_tokens, output_tokens: of all answers; they are never added up.
        ttft, itl, tpot, e2e: in seconds, of answers whose latencies count.
        goodput: good answers a second, of those whose latencies count.
        good_share: the share of these that were good; failed ones were not.
        concurrency: requests that were being answered at once, on average.
    """

    requests: int
    failed: int
    short: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    goodput: float
    good_share: float
    concurrency: float

    @property
    def valid(self) -> bool:
        """Whether every answer was whole and as long as asked: only then do figures compare."""
        return self.failed == 0 and self.short == 0

    @property
    def requests_per_s(self) -> float:
        """Answers a second."""
        return _rate(self.requests - self.failed, self.duration_s)

    @property
    def input_per_s(self) -> float:
        """Prompt tokens of answered requests a second."""
        return _rate(self.input_tokens, self.duration_s)

    @property
    def output_per_s(self) -> float:
        """Generated tokens a second."""
        return _rate(self.output_tokens, self.duration_s)


def sample(records: Sequence[Record], slo: Slo) -> Sample:
    """The figures of a run; at least one request."""
    answered = [record for record in records if not record.error]
    counted = [record for record in answered if record.counted]
    good = sum(map(slo.met_by, counted))
    duration = max(record.ended for record in records) - min(record.sent for record in records)
    tpots = [record.tpot for record in counted]
    return Sample(
        requests=len(records),
        failed=len(records) - len(answered),
        short=sum(record.output_tokens != record.asked_tokens for record in answered),
        duration_s=duration,
        input_tokens=sum(record.input_tokens for record in answered),
        output_tokens=sum(record.output_tokens for record in answered),
        ttft=Spread.of([record.ttft for record in counted]),
        itl=Spread.of([gap for record in counted for gap in record.gaps]),
        tpot=Spread.of([tpot for tpot in tpots if tpot is not None]),
        e2e=Spread.of([record.e2e for record in counted]),
        goodput=_rate(good, duration),
        good_share=_rate(good, sum(record.counted for record in records)),
        concurrency=_rate(sum(record.e2e for record in answered), duration),
    )


def _rate(count: float, of: float) -> float:
    return count / of if of > 0 else 0.0
