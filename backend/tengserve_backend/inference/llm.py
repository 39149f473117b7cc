"""An LLM engine as a model of tensors, with the names of Triton's vLLM backend.

In: `text_input`, or `input_ids` as TensorRT-LLM has it; every other field of `generation/triton.py` as a tensor of one
element or as a request parameter. Out: `text_output` and, when asked for, the others. With `stream` a response a token,
the last one final; without it one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import numpy as np

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import DeadlineExceededError, GenerationFailedError, InvalidRequestError, shown
from tengserve_backend.generation import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs, triton
from tengserve_backend.generation.checks import MAX_TOKEN_ID
from tengserve_backend.generation.fields import Kind
from tengserve_backend.generation.request import DEFAULT_TIMEOUT_S, LOWEST_PRIORITY
from tengserve_backend.inference.datatypes import Datatype
from tengserve_backend.inference.model import FailureReason, ModelStatistics, TensorSpec
from tengserve_backend.inference.request import InferRequest, InferResponse, InferTensor

PLATFORM: Final = "tengserve"
"""The backend's name in config.pbtxt: an LLM has no other platform."""

GRACE_S: Final = 5.0
"""How long after its timeout a request waits for the engine to end it. Past that the engine is taken for dead."""

_NS: Final = 1_000_000_000
FINISH_REASONS: Final = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""As the vLLM backend has them; before its end an answer has the text None."""

_TOKEN_IDS: Final = frozenset({Datatype.INT32, Datatype.INT64, Datatype.UINT32})
_DATATYPES: Final = {
    Kind.BOOLEAN: Datatype.BOOL,
    Kind.INTEGER: Datatype.INT32,
    Kind.UNSIGNED: Datatype.UINT64,
    Kind.FLOAT: Datatype.FP32,
    Kind.STRING: Datatype.BYTES,
    Kind.STOP: Datatype.BYTES,
}
INPUTS: Final = (
    TensorSpec("text_input", Datatype.BYTES, (1,), optional=True),
    TensorSpec("input_ids", Datatype.INT32, (-1,), optional=True),
    *(
        TensorSpec(name, _DATATYPES[kind], (-1,) if kind is Kind.STOP else (1,), optional=True)
        for name, kind in triton.kinds().items()
    ),
)
"""All that a request may have, the same for every LLM."""
OUTPUTS: Final = (
    TensorSpec("text_output", Datatype.BYTES, (-1,)),
    TensorSpec("output_ids", Datatype.INT32, (-1,)),
    TensorSpec("finish_reason", Datatype.BYTES, (-1,)),
    TensorSpec("cumulative_logprob", Datatype.FP32, (-1,)),
    TensorSpec("logprobs", Datatype.BYTES, (-1,)),
    TensorSpec("num_input_tokens", Datatype.UINT32, (1,)),
    TensorSpec("num_output_tokens", Datatype.UINT32, (-1,)),
)
"""All that a response may have."""
_PROMPTS: Final = ("text_input", "input_ids")


class LlmTensorModel:
    """Implements TensorModel, and AnswersWhole, over an engine; it owns nothing, so stop and drain are the engine's."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Final = engine

    @property
    def name(self) -> str:
        """The model's name."""
        return self.engine.info.name

    @property
    def version(self) -> str:
        """The version."""
        return self.engine.info.version

    @property
    def platform(self) -> str:
        """The backend's name."""
        return PLATFORM

    @property
    def max_batch_size(self) -> int:
        """0: requests are batched by the engine, not by their shape."""
        return 0

    @property
    def decoupled(self) -> bool:
        """True, as of every LLM in Triton."""
        return True

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All optional; one of `text_input` and `input_ids` must be there."""
        return INPUTS

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Only `text_output` comes unasked, and `output_ids` for a prompt of `input_ids`."""
        return OUTPUTS

    async def is_ready(self) -> bool:
        """Whether the engine lives."""
        return self.engine.status().alive

    def statistics(self) -> ModelStatistics:
        """Of all requests of the engine, whatever the protocol; those that failed or were cancelled have no times."""
        status = self.engine.status()
        seen = status.statistics
        finished = sum(seen.finished.values())
        waited, first, further = (
            round(histogram.total * _NS)
            for histogram in (seen.queue_seconds, seen.first_token_seconds, seen.token_seconds)
        )
        return ModelStatistics(
            inference_count=finished,
            execution_count=status.steps,
            last_inference_ms=seen.last_inference_ms,
            success=(finished, first + further),
            fail=(seen.failed, 0),
            queue=(seen.queue_seconds.count, waited),
            compute_infer=(finished, max(0, first + further - waited)),
            cancel=(seen.aborted, 0),
            failures={FailureReason.BACKEND: seen.failed},
            pending=status.waiting_requests,
        )

    async def drain(self, timeout_s: float) -> bool:
        """As Engine.drain."""
        return await self.engine.drain(timeout_s)

    def stop(self) -> None:
        """As Engine.stop."""
        self.engine.stop()

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """As TensorModel.infer."""
        answer = self._answer(request)
        if not answer.options.stream:
            yield await self._whole(answer)
            return
        async with aclosing(self._events(answer)) as events:
            async for event in events:
                yield answer.response([event])

    async def infer_whole(self, request: InferRequest) -> InferResponse:
        """As AnswersWhole: `stream` changes nothing but that the prompt is not repeated."""
        return await self._whole(self._answer(request))

    async def _whole(self, answer: _Answer) -> InferResponse:
        async with aclosing(self._events(answer)) as events:
            return answer.response([event async for event in events])

    async def _events(self, answer: _Answer) -> AsyncGenerator[TokenEvent]:
        generation = await self.engine.submit(answer.request)
        if answer.cancellation is not None:
            loop = asyncio.get_running_loop()
            answer.cancellation.listen(lambda: _call_there(loop, generation.abort))
        answer.prompt_tokens = generation.prompt_tokens
        deadline = asyncio.get_running_loop().time() + answer.request.timeout_s + GRACE_S
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    event = await anext(generation)
                yield event
                if event.finish is not None:
                    return
        except StopAsyncIteration:
            raise GenerationFailedError("The engine ended the answer without a reason.") from None
        except TimeoutError:
            raise DeadlineExceededError("The engine did not answer in time.") from None
        finally:
            generation.abort()

    def _answer(self, request: InferRequest) -> _Answer:
        tensors = {tensor.name: tensor for tensor in request.inputs}
        _check_names(request)
        prompt = self._prompt(tensors)
        values: dict[str, object] = dict(request.parameters)
        values |= {name: _value(tensor) for name, tensor in tensors.items() if name not in _PROMPTS}
        generation, options = triton.read(
            values, prompt, request_id=request.request_id or uuid.uuid4().hex, limits=self.engine.info.limits
        )
        generation = replace(
            generation,
            priority=min(request.priority, LOWEST_PRIORITY) or LOWEST_PRIORITY,
            timeout_s=min(request.timeout_us / 1e6, DEFAULT_TIMEOUT_S) or DEFAULT_TIMEOUT_S,
        )
        wanted = {output.name for output in request.outputs}
        if generation.logprobs is None and wanted & {"logprobs", "cumulative_logprob"}:
            generation = replace(generation, logprobs=0)
        return _Answer(self, request, generation, options, wanted)

    def _prompt(self, tensors: dict[str, InferTensor]) -> str | tuple[int, ...]:
        given = [tensors[name] for name in _PROMPTS if name in tensors]
        if len(given) != 1:
            raise InvalidRequestError(
                f"model '{self.name}' needs exactly one of the inputs 'text_input' and 'input_ids', got {len(given)}",
                field="text_input",
            )
        return _token_ids(given[0]) if given[0].name == "input_ids" else self._text(given[0])

    def _text(self, tensor: InferTensor) -> str:
        if tensor.datatype is not Datatype.BYTES or tensor.data.size != 1:
            raise InvalidRequestError(
                f"input 'text_input' must be BYTES of one element, got {tensor.datatype.value} of {tensor.data.size}",
                field="text_input",
            )
        text = _decoded(tensor.name, tensor.data.reshape(-1)[0])
        if not text:
            raise InvalidRequestError("input 'text_input' must have at least 1 character, got 0", field="text_input")
        return text


class _Answer:
    """One request being answered; `response` is called with its events in order, all at once or one by one."""

    def __init__(
        self,
        model: LlmTensorModel,
        request: InferRequest,
        generation: GenerationRequest,
        options: triton.TritonOptions,
        wanted: set[str],
    ) -> None:
        self.request = generation
        self.cancellation = request.cancellation
        self.options = options
        self._echo = generation.prompt if options.echoes() and isinstance(generation.prompt, str) else ""
        self._head = (model.name, model.version, request.request_id)
        self._wanted = wanted or {
            "text_output",
            *(("output_ids",) if not isinstance(generation.prompt, str) else ()),
            *(("finish_reason",) if options.finish_reason else ()),
            *(("cumulative_logprob",) if options.cumulative_logprob else ()),
            *(("logprobs",) if options.logprobs else ()),
            *(("num_input_tokens",) if options.num_input_tokens else ()),
            *(("num_output_tokens",) if options.num_output_tokens else ()),
        }
        self._cumulative = 0.0
        self.prompt_tokens = 0

    def response(self, events: Sequence[TokenEvent]) -> InferResponse:
        finish = events[-1].finish
        self._cumulative += sum(event.logprobs.logprob for event in events if event.logprobs is not None)
        text = self._echo + "".join(event.text for event in events)
        self._echo = ""
        tensors = tuple(self._tensor(spec.name, text, events) for spec in OUTPUTS if spec.name in self._wanted)
        return InferResponse(*self._head, tensors, final=finish is not None)

    def _tensor(self, name: str, text: str, events: Sequence[TokenEvent]) -> InferTensor:
        finish = events[-1].finish
        match name:
            case "text_output":
                return _bytes(name, text.encode())
            case "output_ids":
                return _numbers(name, Datatype.INT32, [event.token_id for event in events])
            case "finish_reason":
                return _bytes(name, b"None" if finish is None else FINISH_REASONS[finish.reason].encode())
            case "cumulative_logprob":
                return _numbers(name, Datatype.FP32, [self._cumulative])
            case "logprobs":
                return _bytes(name, logprobs_json(events).encode())
            case "num_input_tokens":
                return _numbers(name, Datatype.UINT32, [self.prompt_tokens])
            case _:
                return _numbers(name, Datatype.UINT32, [len(events)])


def _call_there(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed: nobody reads.
        loop.call_soon_threadsafe(call)


def _check_names(request: InferRequest) -> None:
    known = {spec.name for spec in INPUTS}
    seen: set[str] = set()
    for tensor in request.inputs:
        if tensor.name not in known:
            raise InvalidRequestError(
                f"unexpected inference input '{shown(tensor.name)}' for model '{shown(request.model)}'",
                field=tensor.name,
            )
        if tensor.name in request.parameters or tensor.name in seen:
            raise InvalidRequestError(f"input '{tensor.name}' already exists in request", field=tensor.name)
        seen.add(tensor.name)
    for name in request.parameters:
        if not triton.knows(name):
            raise InvalidRequestError(
                f"parameter '{shown(name)}' is not one that model '{shown(request.model)}' knows", field=name
            )


def _value(tensor: InferTensor) -> object:
    """A field's value as JSON would have it: the element of a tensor of one, else the list."""
    items = tensor.data.reshape(-1).tolist()
    if tensor.datatype in (Datatype.BF16, Datatype.FP16):
        raise InvalidRequestError(
            f"input '{tensor.name}' must not be {tensor.datatype.value}: send FP32 or another datatype",
            field=tensor.name,
        )
    if tensor.datatype is Datatype.BYTES:
        items = [_decoded(tensor.name, item) for item in items]
    return items[0] if len(items) == 1 else items


def _decoded(name: str, item: object) -> str:
    if not isinstance(item, bytes):
        return str(item)
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"input '{name}' must be UTF-8 text, byte {error.start} is not", field=name) from None


def _token_ids(tensor: InferTensor) -> tuple[int, ...]:
    one_row = len(tensor.shape) == 1 or (len(tensor.shape) == 2 and tensor.shape[0] == 1)
    if tensor.datatype not in _TOKEN_IDS or not one_row or tensor.data.size == 0:
        raise InvalidRequestError(
            f"input 'input_ids' must be INT32, INT64 or UINT32 of shape [n] or [1,n] with n at least 1, "
            f"got {tensor.datatype.value} of shape {shown(list(tensor.shape))}",
            field="input_ids",
        )
    ids: list[int] = tensor.data.reshape(-1).tolist()
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        wrong = next(item for item in ids if not 0 <= item <= MAX_TOKEN_ID)
        raise InvalidRequestError(
            f"input 'input_ids' must have token ids in [0, {MAX_TOKEN_ID}], got {wrong}", field="input_ids"
        )
    return tuple(ids)


def _bytes(name: str, item: bytes) -> InferTensor:
    data = np.empty(1, np.object_)
    data[0] = item
    return InferTensor(name, Datatype.BYTES, data)


def _numbers(name: str, datatype: Datatype, items: Sequence[int | float]) -> InferTensor:
    return InferTensor(name, datatype, np.array(items, datatype.dtype))


def logprobs_json(events: Sequence[TokenEvent]) -> str:
    """A JSON text as the vLLM backend has it: a list with one object a token, from token id to its log probability."""
    return json.dumps([_alternatives(event, event.logprobs) for event in events if event.logprobs])


def _alternatives(event: TokenEvent, logprobs: TokenLogprobs) -> dict[str, dict[str, object]]:
    entries: dict[str, dict[str, object]] = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": None}
        for rank, (token_id, logprob) in enumerate(logprobs.top, start=1)
    }
    chosen = {"logprob": logprobs.logprob, "rank": logprobs.rank, "decoded_token": event.text}
    return {
        str(logprobs.token_id): chosen,
        **{key: entry for key, entry in entries.items() if key != str(event.token_id)},
    }
