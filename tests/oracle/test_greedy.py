"""Greedy ids equal plain transformers in float32: alone, batched, chunked, preempted, on a prefix hit, reloaded."""

from __future__ import annotations

import asyncio
import random

from support.architectures import PACKED
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.generation import GenerationRequest, SamplingParams


def prompts(count: int, seed: int = 1, longest: int = 45) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(2, 199) for _ in range(chooser.randrange(3, longest))] for _ in range(count)]


async def ids(engine: NativeEngine, prompt: list[int], count: int, **fields) -> list[int]:
    generation = await engine.submit(GenerationRequest("r", tuple(prompt), max_new_tokens=count, **fields))
    return [event.token_id async for event in generation]


async def staggered(engine: NativeEngine, all_prompts: list[list[int]], count: int) -> list[list[int]]:
    """Each request arrives when the one before it has had its second token."""

    async def read(generation, arrived: asyncio.Event) -> list[int]:
        got = []
        async for event in generation:
            got.append(event.token_id)
            if len(got) == 2:
                arrived.set()
        return got

    tasks: list[asyncio.Task[list[int]]] = []
    for prompt in all_prompts:
        generation = await engine.submit(GenerationRequest("r", tuple(prompt), max_new_tokens=count))
        arrived = asyncio.Event()
        tasks.append(asyncio.create_task(read(generation, arrived)))
        await asyncio.wait_for(arrived.wait(), 60)
    return list(await asyncio.gather(*tasks))


async def test_alone_and_after_a_reload(oracle):
    batch = prompts(2)
    expected = [oracle.greedy(prompt, 16) for prompt in batch]
    for _ in range(2):
        engine = oracle.start()
        assert [await ids(engine, prompt, 16) for prompt in batch] == expected
        oracle.stop()


async def test_eight_with_staggered_arrival(oracle):
    batch = prompts(8)
    assert await staggered(oracle.start(), batch, 12) == [oracle.greedy(prompt, 12) for prompt in batch]


async def test_in_chunks_of_seven(oracle):
    batch = prompts(4, seed=2)
    assert await staggered(oracle.start(budget=7, running=4), batch, 12) == [
        oracle.greedy(prompt, 12) for prompt in batch
    ]


async def test_with_preemption(oracle):
    engine = oracle.start(blocks=8)
    batch = prompts(6, seed=3)
    got = await asyncio.gather(*(ids(engine, prompt, 20) for prompt in batch))
    assert list(got) == [oracle.greedy(prompt, 20) for prompt in batch]
    assert engine.status().preemptions > 0


async def test_prefix_hits_change_nothing(oracle):
    engine = oracle.start()
    (long,) = prompts(1, seed=7)
    long = (long * 20)[:50]
    await ids(engine, long, 2)
    for length in (15, 16, 17, 33):
        before = engine.status().prefix_hit_tokens
        prompt = long[:length]
        assert await ids(engine, prompt, 8) == oracle.greedy(prompt, 8)
        expected_hit = (length - 1) // 16 * 16 if oracle.name in PACKED else 0
        assert engine.status().prefix_hit_tokens - before == expected_hit
    tail = [*long[:33], 5, 6, 7]
    assert await ids(engine, tail, 8) == oracle.greedy(tail, 8)


async def test_a_seeded_answer_is_the_same_alone_and_in_any_company(llama, device):
    oracle = llama(device)
    engine = oracle.start()

    async def sampled(prompt: list[int], seed: int | None) -> list[int]:
        sampling = SamplingParams(do_sample=True, temperature=0.9, top_k=50, top_p=0.95, seed=seed)
        return await ids(engine, prompt, 32, sampling=sampling)

    try:
        first, *others = prompts(8, seed=4)
        alone = await sampled(first, 42)
        among_unseeded = await asyncio.gather(sampled(first, 42), *(sampled(prompt, None) for prompt in others))
        among_seeded = await asyncio.gather(
            *(sampled(prompt, 100 + n) for n, prompt in enumerate(others)), sampled(first, 42)
        )
        assert among_unseeded[0] == alone
        assert among_seeded[-1] == alone
        assert await sampled(first, 43) != alone
    finally:
        oracle.stop()
