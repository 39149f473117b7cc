"""One prompt on a real model, alone and several at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tengserve_backend.engine.base import Engine, ModelInfo
from tengserve_backend.generation import GenerationRequest

PROMPT = "The capital of France is"
NEW_TOKENS = 32
AT_ONCE = 8
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a model did.

    Attributes:
        info: the model, and what it ran on.
        text: the answer.
        first_s: until the first token, alone.
        tokens_per_s: after it, alone.
        tokens_per_s_at_once: of all requests together, prompts included.
    """

    info: ModelInfo
    text: str
    first_s: float
    tokens_per_s: float
    tokens_per_s_at_once: float


async def generate(engine: Engine) -> GenerationResult:
    """Answer the prompt once to warm up, once for the figures, and several times at once.

    Raises:
        TengserveError: a request failed.
    """
    await _answer(engine, "warm-up")
    text, arrivals, began = await _answer(engine, "alone")
    at_once = time.perf_counter()
    answers = await asyncio.gather(*(_answer(engine, f"at-once-{number}") for number in range(AT_ONCE)))
    took = time.perf_counter() - at_once
    between = arrivals[-1] - arrivals[0]
    return GenerationResult(
        info=engine.info,
        text=text,
        first_s=arrivals[0] - began,
        tokens_per_s=(len(arrivals) - 1) / between if between > 0 else 0.0,
        tokens_per_s_at_once=sum(len(each) for _, each, _ in answers) / took,
    )


async def _answer(engine: Engine, name: str) -> tuple[str, list[float], float]:
    """The text, when each token came, and when it was asked for."""
    began = time.perf_counter()
    request = GenerationRequest(name, PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=_TIMEOUT_S)
    generation = await engine.submit(request)
    text, arrivals = "", []
    async for event in generation:
        text += event.text
        arrivals.append(time.perf_counter())
    return text, arrivals, began
