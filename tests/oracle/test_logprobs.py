"""Log probabilities equal those of a plain transformers forward, however a request was computed."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.generation import GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs

PROMPT = [(17 * n + 5) % 190 + 2 for n in range(45)]

packed = pytest.mark.parametrize("architecture", ["llama"], indirect=True)
every_tier = pytest.mark.parametrize("architecture", ["llama", "gemma3", "bloom", "llama-dynamic-rope"], indirect=True)


async def events(engine: NativeEngine, prompt: list[int], count: int, **fields) -> list[TokenEvent]:
    generation = await engine.submit(GenerationRequest("r", tuple(prompt), max_new_tokens=count, **fields))
    return [event async for event in generation]


def plain(oracle, token_ids: list[int]) -> torch.Tensor:
    """transformers' log probabilities after each of these tokens."""
    with torch.no_grad():
        return copy.deepcopy(oracle.reference)(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def check(found: TokenLogprobs | None, scores: torch.Tensor, token: int, top: int) -> None:
    assert found is not None
    assert found.token_id == token
    assert found.logprob == pytest.approx(float(scores[token]), abs=2e-4)
    assert found.rank == int((scores > scores[token]).sum()) + 1
    best = scores.topk(top)
    assert [entry[0] for entry in found.top] == best.indices.tolist()
    assert [entry[1] for entry in found.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def check_prompt(oracle, first: TokenEvent, prompt: list[int], top: int) -> None:
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    scores = plain(oracle, prompt)
    for index in range(1, len(prompt)):
        check(first.prompt_logprobs[index], scores[index - 1], prompt[index], top)


@every_tier
@pytest.mark.parametrize("budget", [128, 7])
async def test_prompt(oracle, budget):
    first, second = await events(oracle.start(budget=budget, running=7), PROMPT, 2, prompt_logprobs=3)
    check_prompt(oracle, first, PROMPT, 3)
    assert second.prompt_logprobs is None
    assert first.logprobs is None


@packed
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(do_sample=True, temperature=3.0, top_k=5, seed=4)]
)
async def test_output_is_scored_by_the_models_own_distribution(oracle, sampling):
    answer = await events(oracle.start(budget=7, running=4), PROMPT, 8, sampling=sampling, logprobs=4)
    tokens = [event.token_id for event in answer]
    scores = plain(oracle, PROMPT + tokens)
    for index, event in enumerate(answer):
        assert event.prompt_logprobs is None
        check(event.logprobs, scores[len(PROMPT) - 1 + index], tokens[index], 4)


@packed
async def test_a_bias_and_penalties_do_not_show(oracle):
    sampling = SamplingParams(logit_bias=((50, 80.0),), repetition_penalty=1.5)
    (event,) = await events(oracle.start(), PROMPT, 1, sampling=sampling, logprobs=0)
    assert event.token_id == 50
    check(event.logprobs, plain(oracle, PROMPT)[-1], 50, 0)


@packed
async def test_an_equal_prompt_that_is_cached_is_scored_all_the_same(oracle):
    engine = oracle.start()
    await events(engine, PROMPT, 4)
    hits = engine.status().prefix_hit_tokens
    first, *_ = await events(engine, PROMPT, 4, prompt_logprobs=2)
    check_prompt(oracle, first, PROMPT, 2)
    assert engine.status().prefix_hit_tokens == hits
    # What it computed again serves the next one.
    await events(engine, PROMPT, 4)
    assert engine.status().prefix_hit_tokens == hits + 32


@every_tier
async def test_in_mixed_batches_under_preemption(oracle):
    engine = oracle.start(budget=12, running=6, blocks=9)
    prompts = [PROMPT[n : n + 20 + n] for n in range(6)]
    asked = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {},
        {"prompt_logprobs": 0},
        {"logprobs": 0},
        {"logprobs": 2},
        {"logprobs": 5, "prompt_logprobs": 3},
    ]
    answers = await asyncio.gather(
        *(events(engine, prompt, 20, **fields) for prompt, fields in zip(prompts, asked, strict=True))
    )
    assert engine.status().preemptions > 0
    for prompt, fields, answer in zip(prompts, asked, answers, strict=True):
        tokens = [event.token_id for event in answer]
        assert tokens == oracle.greedy(prompt, 20)
        if "prompt_logprobs" in fields:
            check_prompt(oracle, answer[0], prompt, fields["prompt_logprobs"])
        assert all(event.prompt_logprobs is None for event in answer[1:])
        assert all((event.logprobs is not None) == ("logprobs" in fields) for event in answer)
        if "logprobs" in fields and oracle.name != "llama-dynamic-rope":
            scores = plain(oracle, prompt + tokens)
            for index, event in enumerate(answer):
                check(event.logprobs, scores[len(prompt) - 1 + index], tokens[index], fields["logprobs"])
