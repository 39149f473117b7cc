"""Answers do not depend on torch's default dtype, which transformers switches while another model is loaded."""

from __future__ import annotations

import asyncio
import threading

import torch

from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.execution.default_dtype import making_model
from tengserve_backend.generation import GenerationRequest, SamplingParams

PROMPT = tuple(range(20, 50))
SAMPLING = SamplingParams(
    do_sample=True, temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3, seed=5
)
NEEDS_IT_STEADY = {"llama-dynamic-rope"}


async def ids(engine: NativeEngine, **fields) -> list[int]:
    generation = await engine.submit(GenerationRequest("r", PROMPT, max_new_tokens=12, **fields))
    return [event.token_id async for event in generation]


class Switched:
    """A thread that holds the default dtype at bfloat16, as transformers does while it makes a model."""

    def __init__(self) -> None:
        self._on, self._off = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with making_model(torch.bfloat16):
            torch.set_default_dtype(torch.bfloat16)
            self._on.set()
            self._off.wait(60)
            torch.set_default_dtype(torch.float32)

    def __enter__(self) -> Switched:
        self._thread.start()
        assert self._on.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._off.set()
        self._thread.join(60)


async def test_answers_while_another_model_is_made(oracle):
    expected = oracle.greedy(list(PROMPT), 12)
    engine = oracle.start()
    sampled = await ids(engine, sampling=SAMPLING)
    with Switched():
        answers = asyncio.gather(ids(engine), ids(engine, sampling=SAMPLING))
        if oracle.name in NEEDS_IT_STEADY:
            # It is in a step, and waits there.
            async with asyncio.timeout(60):
                while not engine.status().running_requests:  # noqa: ASYNC110 - made true by the engine's thread, which sets no event
                    await asyncio.sleep(0)
        else:
            await answers
    assert await answers == [expected, sampled]
