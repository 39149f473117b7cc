"""The LLM behind its tensor names, as clients of Triton's LLM backends use it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from support.fake_engine import FakeEngine, tokens
from tengserve_backend.errors import InvalidRequestError, OverloadedError, RequestAbortedError
from tengserve_backend.generation import Finish, FinishReason, TokenEvent, TokenLogprobs
from tengserve_backend.inference import (
    Cancellation,
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    RequestedOutput,
)
from tengserve_backend.inference.llm import LlmTensorModel
from tengserve_backend.inference.unary import AnswersWhole, closing, infer_once


def text(value: str, name: str = "text_input") -> InferTensor:
    return InferTensor(name, Datatype.BYTES, np.array([value.encode()], np.object_))


def number(name: str, value: Any, datatype: Datatype) -> InferTensor:
    return InferTensor(name, datatype, np.array([value], datatype.dtype))


def request(*inputs: InferTensor, outputs: tuple[str, ...] = (), **fields: Any) -> InferRequest:
    parameters = fields.pop("parameters", {})
    return InferRequest(
        "smollm2", "", "r1", inputs, tuple(RequestedOutput(name) for name in outputs), parameters, **fields
    )


def values(response: InferResponse) -> dict[str, Any]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def streamed(model: LlmTensorModel, asked: InferRequest) -> list[InferResponse]:
    return [response async for response in model.infer(asked)]


async def test_the_whole_answer_repeats_the_prompt_unless_told_not_to() -> None:
    model = LlmTensorModel(FakeEngine())
    (response,) = await streamed(model, request(text("Say: ")))
    assert (response.model, response.version, response.request_id, response.final) == ("smollm2", "1", "r1", True)
    assert values(response) == {"text_output": [b"Say: Hello world"]}
    (response,) = await streamed(model, request(text("Say: "), number("exclude_input_in_output", True, Datatype.BOOL)))
    assert values(response) == {"text_output": [b"Hello world"]}


async def test_a_request_that_its_maker_cancels_ends_with_an_error() -> None:
    gate = asyncio.Event()
    first, *further = tokens("Hello", " world")
    engine = FakeEngine([first, gate, *further])
    cancellation = Cancellation()
    responses = LlmTensorModel(engine).infer(
        request(text("Say: "), parameters={"stream": True}, cancellation=cancellation)
    )
    assert values(await anext(responses)) == {"text_output": [b"Hello"]}
    cancellation.ask()
    await engine.generations[0].aborted.wait()
    gate.set()
    with pytest.raises(RequestAbortedError):
        await anext(responses)


async def test_a_stream_has_a_response_a_token_and_the_last_is_final() -> None:
    engine = FakeEngine(tokens("Hello", "", " world", reason=FinishReason.EOS))
    flags = {"stream": True, "return_finish_reason": True, "return_num_output_tokens": True}
    responses = await streamed(LlmTensorModel(engine), request(text("Say: "), parameters=flags))
    assert [response.final for response in responses] == [False, False, True]
    assert [values(response)["text_output"] for response in responses] == [[b"Hello"], [b""], [b" world"]]
    assert [values(response)["finish_reason"] for response in responses] == [[b"None"], [b"None"], [b"stop"]]
    assert [values(response)["num_output_tokens"] for response in responses] == [[1], [1], [1]]


async def test_one_response_even_of_a_stream() -> None:
    model = LlmTensorModel(FakeEngine())
    assert isinstance(model, AnswersWhole)
    flags = {"stream": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    response = await infer_once(model, request(text("Say: "), parameters=flags))
    assert response.final
    assert values(response) == {"text_output": [b"Hello world"], "num_input_tokens": [7], "num_output_tokens": [2]}


@pytest.mark.parametrize("datatype", [Datatype.INT32, Datatype.INT64, Datatype.UINT32])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
async def test_token_ids_in_and_out(datatype: Datatype, shape: tuple[int, ...]) -> None:
    engine = FakeEngine()
    ids = InferTensor("input_ids", datatype, np.array([5, 6, 7], datatype.dtype).reshape(shape))
    response = await infer_once(LlmTensorModel(engine), request(ids))
    assert engine.requests[0].prompt == (5, 6, 7)
    assert values(response) == {"text_output": [b"Hello world"], "output_ids": [100, 101]}


async def test_outputs_that_are_asked_for_by_name() -> None:
    asked = request(text("a"), outputs=("finish_reason", "num_output_tokens"))
    response = await infer_once(LlmTensorModel(FakeEngine()), asked)
    assert values(response) == {"finish_reason": [b"length"], "num_output_tokens": [2]}


async def test_log_probabilities() -> None:
    logprobs = TokenLogprobs(9, -0.5, 2, ((8, -0.25), (9, -0.5)))
    engine = FakeEngine([TokenEvent(9, "x", 1.0, Finish(FinishReason.EOS, 7, 1, 1), logprobs)])
    parameters = {"return_logprobs": True, "return_cumulative_logprob": True, "logprobs": 2}
    found = values(await infer_once(LlmTensorModel(engine), request(text("a"), parameters=parameters)))
    assert engine.requests[0].logprobs == 2
    assert found["cumulative_logprob"] == [-0.5]
    assert json.loads(found["logprobs"][0]) == [
        {
            "9": {"logprob": -0.5, "rank": 2, "decoded_token": "x"},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": None},
        }
    ]


async def test_sampling_by_every_road() -> None:
    """Parameters, a JSON text that wins over them, numbers as text, and tensors of one element."""
    engine = FakeEngine()
    model = LlmTensorModel(engine)
    sampling = text('{"temperature": "0.5", "stop": ["a", "b"]}', "sampling_parameters")
    await infer_once(model, request(text("p"), sampling, parameters={"temperature": 0.9, "max_tokens": "256"}))
    await infer_once(
        model,
        request(
            text("p"),
            number("max_tokens", 7, Datatype.INT32),
            number("top_p", 0.5, Datatype.FP32),
            number("random_seed", 11, Datatype.UINT64),
            InferTensor("stop_words", Datatype.BYTES, np.array([b"x", b""], np.object_)),
            text("", "bad_words"),
            number("beam_width", 1, Datatype.INT32),
        ),
    )
    first, second = engine.requests
    assert (first.max_new_tokens, first.stop) == (256, ("a", "b"))
    assert (first.sampling.do_sample, first.sampling.temperature) == (True, 0.5)
    assert (second.max_new_tokens, second.stop) == (7, ("x",))
    assert (second.sampling.do_sample, second.sampling.top_p, second.sampling.seed) == (True, 0.5, 11)


async def test_values_that_only_these_backends_allow() -> None:
    engine = FakeEngine()
    parameters = {"temperature": 0.0, "top_k": -1, "seed": 0}
    await infer_once(LlmTensorModel(engine), request(text("p"), parameters=parameters))
    sampling = engine.requests[0].sampling
    assert (sampling.do_sample, sampling.top_k, sampling.seed) == (False, 0, 0)


async def test_priority_and_timeout_are_the_protocols() -> None:
    engine = FakeEngine()
    model = LlmTensorModel(engine)
    await infer_once(model, request(text("p")))
    await infer_once(model, request(text("p"), priority=2, timeout_us=1_500_000))
    await infer_once(model, request(text("p"), priority=2**63, timeout_us=2**63))
    assert [(r.priority, r.timeout_s) for r in engine.requests] == [(5, 600.0), (2, 1.5), (5, 600.0)]


@pytest.mark.parametrize(
    ("inputs", "parameters", "complaint"),
    [
        ((), {}, "exactly one of the inputs 'text_input' and 'input_ids', got 0"),
        ((text("a"), text("b", "PROMPT")), {}, "unexpected inference input 'PROMPT' for model 'smollm2'"),
        ((text(""),), {}, "must have at least 1 character, got 0"),
        ((number("text_input", 1, Datatype.INT32),), {}, "must be BYTES of one element, got INT32 of 1"),
        ((InferTensor("text_input", Datatype.BYTES, np.array([b"\xff"], np.object_)),), {}, "must be UTF-8 text"),
        ((number("input_ids", -1, Datatype.INT32),), {}, "must have token ids in [0, 1048576], got -1"),
        ((number("input_ids", 1.0, Datatype.FP32),), {}, "must be INT32, INT64 or UINT32"),
        ((text("a"),), {"temprature": 1.0}, "parameter 'temprature' is not one that model 'smollm2' knows"),
        ((text("a"),), {"max_tokens": 0}, "Parameter max_tokens must be in [1, 2147483647], got 0"),
        ((text("a"),), {"max_tokens": "many"}, 'max_tokens must be integer type, got "many"'),
        ((text("a"),), {"max_tokens": 1, "max_new_tokens": 2}, "must have one value"),
        ((text("a"),), {"beam_width": 2}, "beam_width must be 1, because nothing else is served, got 2"),
        ((text("a"),), {"bad_words": "x"}, "bad_words must be empty, because it is not served"),
        ((text("a"),), {"stream": True, "exclude_input_in_output": False}, "When streaming, `exclude_input_in_output`"),
        ((text("a"),), {"sampling_parameters": "[]"}, "sampling_parameters must be a JSON object"),
        ((text("a"),), {"sampling_parameters": '{"lora": 1}'}, "has a field that is not known here: lora"),
        ((text("a"), text("1", "n")), {"n": 1}, "input 'n' already exists in request"),
    ],
)
async def test_what_does_not_fit_is_refused(
    inputs: tuple[InferTensor, ...], parameters: dict[str, Any], complaint: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError) as refused:
        await infer_once(LlmTensorModel(engine), request(*inputs, parameters=parameters))
    assert complaint in refused.value.message
    assert not engine.requests


async def test_closing_the_iterator_ends_the_generation() -> None:
    gate = asyncio.Event()
    engine = FakeEngine([*tokens("Hello", " world")[:1], gate])
    async with closing(LlmTensorModel(engine).infer(request(text("p"), parameters={"stream": True}))) as responses:
        assert values(await anext(responses)) == {"text_output": [b"Hello"]}
    assert engine.generations[0].aborted.is_set()


async def test_an_error_of_the_engine_is_the_callers() -> None:
    engine = FakeEngine(submit_error=OverloadedError("The queue is full.", retry_after_s=1))
    with pytest.raises(OverloadedError):
        await infer_once(LlmTensorModel(engine), request(text("p")))
