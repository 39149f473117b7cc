"""Whatever arrives, is cancelled or does not fit at once: every request of an engine has exactly one end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from support.scripted_model import scripted_engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import RequestAbortedError
from tengserve_backend.generation import FinishReason, GenerationRequest

LETTER = 97


@dataclass(frozen=True)
class Plan:
    """One request: when it is cancelled, counted in its own tokens; None lets it end."""

    prompt: int
    output: int
    priority: int
    cancel_after: int | None


plans = st.builds(
    Plan,
    prompt=st.integers(1, 40),
    output=st.integers(1, 20),
    priority=st.integers(1, 5),
    cancel_after=st.one_of(st.none(), st.integers(0, 20)),
)


async def ends_of(engine: NativeEngine, plan: Plan) -> list[object]:
    """Every end that the owner of a request sees, asking on after the first."""
    request = GenerationRequest(
        "r", (LETTER,) * plan.prompt, max_new_tokens=plan.output, priority=plan.priority, ignore_eos=True
    )
    generation = await engine.submit(request)
    ends: list[object] = []
    tokens = 0
    if plan.cancel_after == 0:
        generation.abort()
    while True:
        try:
            event = await anext(generation)
        except StopAsyncIteration:
            return ends
        except RequestAbortedError as error:
            return [*ends, error]
        tokens += 1
        if event.finish is not None:
            assert event.finish.generated_tokens == tokens == plan.output
            ends.append(event.finish.reason)
        if tokens == plan.cancel_after:
            generation.abort()


async def run(requests: list[Plan], blocks: int, running: int, budget: int) -> None:
    engine = scripted_engine(
        lambda position, last: LETTER,
        total_blocks=blocks,
        max_batch_size=running,
        max_batched_tokens=max(budget, running),
    )
    try:
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*(ends_of(engine, plan) for plan in requests))
            assert await engine.drain(60)
        status = engine.status()
    finally:
        await asyncio.to_thread(engine.stop)
    for plan, seen in zip(requests, ends, strict=True):
        cancelled = plan.cancel_after is not None and plan.cancel_after < plan.output
        assert len(seen) == 1
        if isinstance(seen[0], RequestAbortedError):
            assert cancelled
        else:
            # A cancelled request too, when the engine was done with it before its owner had read that far.
            assert seen == [FinishReason.LENGTH]
    assert status.free_blocks + status.cached_blocks == status.total_blocks
    assert (status.running_requests, status.waiting_requests, status.waiting_tokens) == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(plans, min_size=1, max_size=10), st.integers(4, 12), st.integers(1, 5), st.integers(1, 32))
def test_every_request_has_exactly_one_end(requests: list[Plan], blocks: int, running: int, budget: int) -> None:
    asyncio.run(run(requests, blocks, running, budget))
