"""Models of plain numpy for tests of v2 infer, and a repository that remembers what it was told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tengserve_adapter.control import IndexRow, JsonObject, SettingValue
from tengserve_backend.errors import (
    ErrorCode,
    InvalidRequestError,
    ModelExecutionError,
    ModelNotFoundError,
    ModelNotReadyError,
)
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    ModelStatistics,
    TensorSpec,
)
from tengserve_backend.repository.manager import ModelState, ModelStatus

Answers = Callable[["PlainModel", InferRequest], AsyncIterator[InferResponse]]


@dataclass
class PlainModel:
    """A TensorModel that answers by a function; remembers its requests, and those that were not answered to the end."""

    name: str
    answers: Answers
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    decoupled: bool = False
    max_batch_size: int = 0
    version: str = "1"
    platform: str = "python"
    ready: bool = True
    requests: list[InferRequest] = field(default_factory=list)
    began: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    cancelled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    go: dict[str, asyncio.Event] = field(default_factory=dict)

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.requests.append(request)
        self.began.put_nowait(request.request_id)
        try:
            async for response in self.answers(self, request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.put_nowait(request.request_id)
            raise

    def gate(self, request_id: str) -> asyncio.Event:
        """What a request of the model "gated" waits for."""
        return self.go.setdefault(request_id, asyncio.Event())

    async def is_ready(self) -> bool:
        return self.ready

    def statistics(self) -> ModelStatistics:
        return ModelStatistics(inference_count=len(self.requests))

    async def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        return

    def response(self, request: InferRequest, *outputs: InferTensor, final: bool = True) -> InferResponse:
        return InferResponse(self.name, self.version, request.request_id, outputs, final=final)


async def _echo(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    outputs = tuple(InferTensor(tensor.name, tensor.datatype, tensor.data) for tensor in request.inputs)
    yield InferResponse(model.name, model.version, request.request_id, outputs, request.parameters)


async def _add_sub(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    first, second = (tensor.data for tensor in request.inputs)
    outputs = {"OUTPUT0": np.add(first, second), "OUTPUT1": np.subtract(first, second)}
    yield model.response(request, *(InferTensor(name, Datatype.INT32, data) for name, data in outputs.items()))


async def _repeat(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    """Each element in a response of its own; with the parameter "attached" the last one is final, else it is extra."""
    elements = request.inputs[0].data
    attached = bool(request.parameters.get("attached", False))
    for index, element in enumerate(elements):
        last = attached and index == len(elements) - 1
        yield model.response(request, InferTensor("OUT", Datatype.INT32, np.array([element])), final=last)
        await asyncio.sleep(0)
    if not attached:
        yield model.response(request)


async def _gated(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    await model.gate(request.request_id).wait()
    yield model.response(request, *request.inputs)


async def _endless(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    while True:
        yield model.response(request, *request.inputs, final=False)
        await asyncio.sleep(0.001)


async def _failing(model: PlainModel, request: InferRequest) -> AsyncIterator[InferResponse]:
    if "code" not in request.parameters:
        raise RuntimeError("/secret/place")
    yield model.response(request, *request.inputs, final=False)
    raise ModelExecutionError("the model said no", code=ErrorCode[str(request.parameters["code"])])


def plain_models() -> dict[str, PlainModel]:
    """One of each kind, by name."""
    pair = tuple(TensorSpec(f"INPUT{index}", Datatype.INT32, (-1, 16)) for index in range(2))
    sums = tuple(
        TensorSpec(f"OUTPUT{index}", Datatype.INT32, (-1, 16), labels=("zero", "one") if index == 0 else ())
        for index in range(2)
    )
    number = (TensorSpec("IN", Datatype.INT32, (-1,)),)
    out = (TensorSpec("OUT", Datatype.INT32, (1,)),)
    models = (
        PlainModel("simple", _add_sub, pair, sums, max_batch_size=8),
        PlainModel("echo", _echo),
        PlainModel("repeat", _repeat, number, out, decoupled=True),
        PlainModel("gated", _gated),
        PlainModel("endless", _endless, decoupled=True),
        PlainModel("failing", _failing, decoupled=True),
        PlainModel("slow", _gated, ready=False),
    )
    return {model.name: model for model in models}


class PlainModels:
    """The models by name; "loading" is in the repository and not ready."""

    def __init__(self) -> None:
        self.models = plain_models()

    def tensor_model(self, name: str, version: str | None = None) -> PlainModel:
        if name == "loading":
            raise ModelNotReadyError("Model loading is loading.")
        if name not in self.models or version not in (None, "1"):
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found", field="model")
        return self.models[name]

    def statuses(self) -> Sequence[ModelStatus]:
        ready = [ModelStatus(name, "1", ModelState.READY, "") for name in self.models]
        return (*ready, ModelStatus("loading", "1", ModelState.LOADING, ""))


@dataclass
class PlainControl:
    """A repository of two models that remembers what it was told."""

    told: list[tuple[object, ...]] = field(default_factory=list)
    log: dict[str, SettingValue] = field(
        default_factory=lambda: {"log_file": "", "log_info": True, "log_verbose_level": 0, "log_format": "default"}
    )
    trace: dict[str, Sequence[str]] = field(default_factory=lambda: {"trace_level": ["OFF"], "trace_rate": ["1000"]})

    async def index(self, *, ready_only: bool) -> Sequence[IndexRow]:
        rows = [IndexRow("simple", "1", "READY")]
        return rows if ready_only else [*rows, IndexRow("broken", "1", "UNAVAILABLE", "no weights"), IndexRow("new")]

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        if name == "missing":
            raise ModelNotFoundError("failed to load 'missing', failed to poll from model repository")
        self.told.append(("load", name, json.loads(config_json) if config_json else None, dict(files)))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.told.append(("unload", name, unload_dependents))

    def config(self, name: str, version: str) -> JsonObject:
        if name != "simple":
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found", field="model")
        return {
            "name": "simple",
            "platform": "",
            "backend": "python",
            "max_batch_size": 8,
            "version_policy": {"latest": {"num_versions": 1}},
            "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "format": "FORMAT_NONE", "dims": [16]}],
            "dynamic_batching": {"priority_queue_policy": {"1": {"timeout_action": "REJECT", "max_queue_size": 3}}},
            "parameters": {"key": {"string_value": "value"}},
        }

    def statistics(self, name: str, version: str) -> Sequence[JsonObject]:
        if name not in ("", "simple"):
            raise InvalidRequestError(f"requested model '{name}' is not available")
        inference = {"success": {"count": 3, "ns": 4_000_000_000}, "queue": {"count": 3, "ns": 5}}
        row = {"name": "simple", "version": "1", "last_inference": 1_700_000_000_000, "inference_count": 6}
        return [{**row, "execution_count": 3, "inference_stats": inference, "response_stats": {}}]

    def trace_settings(self, model: str, changes: Mapping[str, Sequence[str] | None]) -> Mapping[str, Sequence[str]]:
        for name, values in changes.items():
            self.trace[name] = values or ["default"]
        return self.trace

    def log_settings(self, changes: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
        if "log_file" in changes:
            raise InvalidRequestError("log file location can not be updated through network protocol")
        self.log.update(changes)
        return self.log
