"""Many short requests at once, some of them cancelled at a random moment: what an engine goes through in a day."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tengserve_backend.engine.base import Engine, Generation
from tengserve_backend.errors import RequestAbortedError
from tengserve_backend.generation import GenerationRequest, SamplingParams

_WORDS = ("a server", "answers", "every question", "one token", "at a time", "数据", "blocks", "\n")
_CANCELLED_SHARE = 0.3


@dataclass(slots=True)
class Outcome:
    """How the requests ended.

    Attributes:
        ends: requests by way of their end: "finished" or "cancelled".
        tokens: generated for all.
        wrong: what did not end exactly once, or not in its way.
    """

    ends: Counter[str]
    tokens: int
    wrong: list[str]


async def soak(
    engine: Engine,
    *,
    requests: int,
    concurrency: int,
    seed: int = 1,
    on_end: Callable[[int], None] = lambda count: None,
) -> Outcome:
    """Run the requests; ends when each has ended.

    Args:
        engine: of a model whose vocabulary has at least 259 tokens.
        requests, concurrency: how many, and how many at a time.
        seed: the same seed makes the same requests and decides on the same cancels.
        on_end: called with the number of requests that have ended so far, after each.
    """
    outcome = Outcome(Counter(), 0, [])
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            chooser = random.Random(seed * 1_000_003 + number)
            cancel_after = chooser.randrange(6) if chooser.random() < _CANCELLED_SHARE else None
            generation = await engine.submit(_request(number, chooser))
            await _read(generation, cancel_after, outcome)
            on_end(outcome.ends.total())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return outcome


def _request(number: int, chooser: random.Random) -> GenerationRequest:
    text = " ".join(chooser.choices(_WORDS, k=chooser.randint(1, 12)))
    # A third begin alike, so that blocks are shared.
    shared = tuple(range(10, 10 + 16 * chooser.randint(1, 3)))
    prompt = (*shared, *(chooser.randrange(3, 259) for _ in range(chooser.randint(1, 20))))
    sampled = chooser.random() < 0.5
    return GenerationRequest(
        request_id=str(number),
        prompt=prompt if chooser.random() < 1 / 3 else text,
        max_new_tokens=chooser.randint(1, 16),
        priority=chooser.randint(1, 5),
        stop=("e",) if chooser.random() < 0.2 else (),
        sampling=SamplingParams(do_sample=sampled, temperature=0.9, top_p=0.9, seed=number + 1 if sampled else None),
    )


async def _read(generation: Generation, cancel_after: int | None, outcome: Outcome) -> None:
    """Read to the end, which must be the one that belongs to it, and must be the last thing that comes."""
    finishes, count = 0, 0
    try:
        if cancel_after == 0:
            generation.abort()
        async for event in generation:
            count += 1
            finishes += event.finish is not None
            if count == cancel_after and event.finish is None:
                generation.abort()
    except RequestAbortedError:
        outcome.ends["cancelled"] += 1
        expected = 0 if cancel_after is not None else -1
    else:
        outcome.ends["finished"] += 1
        expected = 1
    outcome.tokens += count
    if finishes != expected:
        outcome.wrong.append(f"request {generation.request_id}: {finishes} finishes, cancel after {cancel_after}")
