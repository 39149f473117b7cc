"""Biases, early ends and log probabilities through a whole engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from support.scripted_model import ByteTokenizer, scripted_engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import InvalidRequestError, InvalidTokenIdError
from tengserve_backend.generation import (
    MAX_LOGIT_BIASES,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)

EOS = 299
VOCABULARY = 300


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    """Says the token after the last one, for ever."""
    started = scripted_engine(lambda position, last: (last + 1) % 128, eos_ids=[EOS], vocab_size=VOCABULARY)
    yield started
    started.stop()


@pytest.fixture
def ending_engine() -> Iterator[NativeEngine]:
    """Ends at once."""
    tokenizer = ByteTokenizer(words=dict.fromkeys(range(256, EOS), "word"), special={EOS: "end"})
    started = scripted_engine(lambda position, last: EOS, eos_ids=[EOS], vocab_size=VOCABULARY, tokenizer=tokenizer)
    yield started
    started.stop()


async def events(engine: NativeEngine, sampling: SamplingParams | None = None, **fields) -> list[TokenEvent]:
    generation = await engine.submit(
        GenerationRequest("r", (1, 2, 3), sampling=sampling or SamplingParams(), **{"max_new_tokens": 4, **fields})
    )
    return [event async for event in generation]


def ids(answer: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in answer]


async def test_a_bias_draws_to_a_token_and_another_away(engine):
    assert ids(await events(engine)) == [4, 5, 6, 7]
    assert ids(await events(engine, SamplingParams(logit_bias=((40, 30.0),)))) == [40, 40, 40, 40]
    assert ids(await events(engine, SamplingParams(logit_bias=((5, -100.0), (60, 5.0))))) == [4, 60, 61, 62]


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, VOCABULARY + 7, 2**63])
async def test_a_bias_outside_the_vocabulary_is_refused_by_name_and_harms_nobody(engine, token_id):
    with pytest.raises(InvalidTokenIdError, match=rf"Token id {token_id} in logit_bias .* vocabulary of 300") as caught:
        await events(engine, SamplingParams(logit_bias=((5, 1.0), (token_id, 1.0))))
    assert caught.value.field == "logit_bias"
    assert ids(await events(engine)) == [4, 5, 6, 7]


async def test_too_many_or_endless_biases_are_refused(engine):
    many = tuple((n % VOCABULARY, 0.5) for n in range(MAX_LOGIT_BIASES + 1))
    with pytest.raises(InvalidRequestError, match="at most 1024 entries, got 1025"):
        await events(engine, SamplingParams(logit_bias=many))
    for bias in (math.inf, -math.inf, math.nan):
        with pytest.raises(InvalidRequestError, match="must be finite"):
            await events(engine, SamplingParams(logit_bias=((5, bias),)))
    assert ids(await events(engine, SamplingParams(logit_bias=many[:MAX_LOGIT_BIASES]))) == [4, 5, 6, 7]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 21])
async def test_too_many_logprobs_are_refused(engine, field, count):
    with pytest.raises(InvalidRequestError, match=f"{field} must be from 0 to 20, got {count}"):
        await events(engine, **{field: count})


@pytest.mark.parametrize("do_sample", [False, True])
async def test_no_end_before_min_new_tokens_even_when_the_end_is_biased(ending_engine, do_sample):
    sampling = SamplingParams(do_sample=do_sample, seed=3, logit_bias=((EOS, 50.0),))
    answer = await events(ending_engine, sampling, min_new_tokens=3, max_new_tokens=9)
    assert len(answer) == 4
    assert EOS not in ids(answer)[:3]
    assert answer[-1].finish is not None
    assert answer[-1].finish.reason is FinishReason.EOS


async def test_repetition_looks_at_the_prompt_and_presence_at_the_output(engine):
    away = SamplingParams(logit_bias=((2, 21.0),), repetition_penalty=2.0)
    assert ids(await events(engine, away, max_new_tokens=1)) == [4]  # 2 is in the prompt: 21 / 2 is below 20
    assert ids(await events(engine, SamplingParams(logit_bias=((2, 21.0),), presence_penalty=2.0)))[:2] == [2, 3]


async def test_logprobs_of_certain_and_impossible_tokens_are_finite(engine):
    sampling = SamplingParams(do_sample=True, top_k=1, seed=1)
    answer = await events(engine, sampling, logprobs=20, prompt_logprobs=20)
    assert ids(answer) == [4, 5, 6, 7]
    for event in answer:
        assert event.logprobs is not None
        assert event.logprobs.rank == 1
        assert len(event.logprobs.top) == 20
        json.dumps([event.logprobs.logprob, event.logprobs.top], allow_nan=False)
    assert answer[0].prompt_logprobs is not None
    assert [entry and entry.token_id for entry in answer[0].prompt_logprobs] == [None, 2, 3]
    json.dumps([entry and (entry.logprob, entry.top) for entry in answer[0].prompt_logprobs], allow_nan=False)


async def test_nobody_gets_logprobs_who_did_not_ask(engine):
    assert all(event.logprobs is None and event.prompt_logprobs is None for event in await events(engine))
