"""Greedy ids equal plain transformers in float32: alone, batched, chunked and preempted."""

from __future__ import annotations

import asyncio
import random

from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.generation import GenerationRequest, SamplingParams, TokenEvent


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, 320) for _ in range(chooser.randrange(3, 60))] for _ in range(count)]


async def answer(engine: NativeEngine, request: GenerationRequest) -> list[TokenEvent]:
    generation = await engine.submit(request)
    return [event async for event in generation]


async def ids(engine: NativeEngine, prompt: list[int], count: int) -> list[int]:
    request = GenerationRequest("r", tuple(prompt), max_new_tokens=count, ignore_eos=True)
    return [event.token_id for event in await answer(engine, request)]


async def staggered(engine: NativeEngine, all_prompts: list[list[int]], count: int) -> list[list[int]]:
    """Each request arrives when the one before it has had its second token."""
    tasks: list[asyncio.Task[list[int]]] = []

    async def read(generation, arrived: asyncio.Event) -> list[int]:
        got = []
        async for event in generation:
            got.append(event.token_id)
            if len(got) == 2:
                arrived.set()
        return got

    for prompt in all_prompts:
        generation = await engine.submit(GenerationRequest("r", tuple(prompt), max_new_tokens=count, ignore_eos=True))
        arrived = asyncio.Event()
        tasks.append(asyncio.create_task(read(generation, arrived)))
        await asyncio.wait_for(arrived.wait(), 60)
    return list(await asyncio.gather(*tasks))


async def test_alone(start_engine, greedy):
    engine = start_engine()
    for prompt in prompts(3):
        assert await ids(engine, prompt, 24) == greedy(prompt, 24)


async def test_eight_with_staggered_arrival(start_engine, greedy):
    engine = start_engine()
    batch = prompts(8)
    assert await staggered(engine, batch, 24) == [greedy(prompt, 24) for prompt in batch]


async def test_eight_in_chunks_of_seven(start_engine, greedy):
    engine = start_engine(chunk=7)
    batch = prompts(8, seed=2)
    assert await staggered(engine, batch, 24) == [greedy(prompt, 24) for prompt in batch]


async def test_eight_with_preemption(start_engine, greedy):
    engine = start_engine(blocks=14)
    batch = prompts(8, seed=3)
    got = await asyncio.gather(*(ids(engine, prompt, 24) for prompt in batch))
    assert list(got) == [greedy(prompt, 24) for prompt in batch]
    assert engine.status().preemptions > 0


async def test_prefix_hits_change_nothing(start_engine, greedy):
    engine = start_engine()
    (long,) = prompts(1, seed=7)
    long = (long * 20)[:60]
    await ids(engine, long, 4)
    for length in (15, 16, 17, 32, 33, 60):
        before = engine.status().prefix_hit_tokens
        assert await ids(engine, long[:length], 12) == greedy(long[:length], 12)
        assert engine.status().prefix_hit_tokens - before == (length - 1) // 16 * 16
        tail = [*long[:length], 5, 6, 7]
        assert await ids(engine, tail, 12) == greedy(tail, 12)


async def test_a_seeded_answer_is_the_same_alone_and_in_any_company(start_engine):
    engine = start_engine()

    def sampled(prompt: list[int], seed: int | None) -> GenerationRequest:
        sampling = SamplingParams(do_sample=True, temperature=0.9, top_k=50, top_p=0.95, seed=seed)
        return GenerationRequest("r", tuple(prompt), sampling=sampling, max_new_tokens=32, ignore_eos=True)

    async def text(request: GenerationRequest) -> str:
        return "".join(event.text for event in await answer(engine, request))

    first, *others = prompts(8, seed=4)
    alone = await text(sampled(first, 42))
    among_unseeded = await asyncio.gather(text(sampled(first, 42)), *(text(sampled(p, None)) for p in others))
    among_seeded = await asyncio.gather(
        *(text(sampled(p, 100 + n)) for n, p in enumerate(others)), text(sampled(first, 42))
    )
    assert among_unseeded[0] == alone
    assert among_seeded[-1] == alone
    assert await text(sampled(first, 43)) != alone
