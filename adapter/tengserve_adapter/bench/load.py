"""Puts a load on one server and writes down when everything came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, cast

from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.figures import Record
from tengserve_adapter.bench.requests import AnswerError, Request

MAX_IN_FLIGHT: Final = 1024
"""Requests by schedule that are open at once; later ones wait, and their wait counts as the server's."""


class Arrivals(Enum):
    """How the times between requests by schedule are spread."""

    POISSON = "poisson"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Concurrency:
    """So many clients, each of which sends its next request when it has its answer."""

    clients: int

    def __str__(self) -> str:
        return f"c{self.clients}"


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests by schedule, whatever the server does.

    Attributes:
        per_second: requests a second, on average.
        arrivals: how they are spread.
        key: equal keys give equal schedules.
    """

    per_second: float
    arrivals: Arrivals
    key: str

    def __str__(self) -> str:
        return f"{self.per_second:.3g}/s"

    def offsets(self) -> Iterator[float]:
        """Seconds from the start to each request, without end. The first is at 0."""
        generator = random.Random(self.key)
        offset = 0.0
        while True:
            yield offset
            poisson = self.arrivals is Arrivals.POISSON
            offset += generator.expovariate(self.per_second) if poisson else 1.0 / self.per_second


Load = Concurrency | Rate


@dataclass(slots=True)
class Answer:
    """What came of one request.

    Attributes:
        record: its times and counts.
        ids: of its tokens, in dialects that have them.
        text: of the whole answer.
    """

    record: Record
    ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class _Answering:
    """An answer that is on its way."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    whole: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    async def read(self, ask: Ask, request: Request, now: Callable[[], float]) -> None:
        # An AsyncIterator in the protocol, a generator in every dialect: that one must be closed when we stop early.
        pieces = cast(Any, ask(request))
        async with aclosing(pieces):
            async for chunk in pieces:
                at = now()
                if chunk.carries:
                    self.arrivals.append(at)
                self.texts.append(chunk.text)
                self.ids += chunk.ids
                self.whole = chunk.whole if chunk.whole is not None else self.whole
                self.input_tokens = chunk.input_tokens or self.input_tokens
                self.output_tokens = chunk.output_tokens or self.output_tokens
        if not self.arrivals:
            raise AnswerError("the answer is empty")
        if self.ids and self.output_tokens not in (None, len(self.ids)):
            raise AnswerError(f"the server counts {self.output_tokens} tokens and sent {len(self.ids)}")


async def answer(
    ask: Ask, request: Request, *, timeout_s: float, now: Callable[[], float], sent: float | None = None
) -> Answer:
    """Send a request and read its answer. What goes wrong is in the record.

    Args:
        ask: the server.
        request: what to send.
        timeout_s: after which it is given up.
        now: a monotonic clock in seconds.
        sent: when it was due, if that is not now.
    """
    answering = _Answering()
    sent = now() if sent is None else sent
    error = ""
    try:
        async with asyncio.timeout(timeout_s):
            await answering.read(ask, request, now)
    except AnswerError as refused:
        error = str(refused)
    except TimeoutError:
        error = f"the answer did not end within {timeout_s:g} s"
    prompt_tokens = len(request.prompt.ids)
    count = answering.output_tokens or len(answering.ids) or len(answering.arrivals)
    # What follows the last token, such as counts, is no part of the answer.
    ended = answering.arrivals[-1] if answering.arrivals and not error else now()
    record = Record(
        sent=sent,
        ended=ended,
        arrivals=tuple(answering.arrivals),
        input_tokens=answering.input_tokens or prompt_tokens,
        output_tokens=count,
        asked_tokens=request.output_tokens,
        counted=request.counted,
        error=error,
    )
    text = "".join(answering.texts) if answering.whole is None else answering.whole
    return Answer(record, tuple(answering.ids), text)


async def run_load(
    ask: Ask,
    requests: Sequence[Request],
    load: Load,
    *,
    timeout_s: float,
    now: Callable[[], float],
    on_answer: Callable[[], None],
) -> list[Answer]:
    """Send all requests as the load says; their answers, in the order of the requests.

    Args:
        ask: the server.
        requests: at least one.
        load: how they are sent.
        timeout_s: of each request.
        now: a monotonic clock in seconds, of the event loop's speed.
        on_answer: called after each answer.
    """
    answers: list[Answer | None] = [None] * len(requests)

    async def one(number: int, sent: float | None = None) -> None:
        answers[number] = await answer(ask, requests[number], timeout_s=timeout_s, now=now, sent=sent)
        on_answer()

    if isinstance(load, Concurrency):
        numbers = iter(range(len(requests)))

        async def client() -> None:
            for number in numbers:
                await one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.clients, len(requests))):
                group.create_task(client())
    else:
        room = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def due(number: int, at: float) -> None:
            try:
                await one(number, at)
            finally:
                room.release()

        began = now()
        async with asyncio.TaskGroup() as group:
            for number, offset in zip(range(len(requests)), load.offsets(), strict=False):
                await asyncio.sleep(began + offset - now())
                await room.acquire()
                group.create_task(due(number, began + offset))
    return [found for found in answers if found is not None]
