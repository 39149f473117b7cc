"""Folders of python models for tests, loaded by the host itself, and the requests to ask them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tengserve_backend.errors import ModelNotFoundError
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    RequestedOutput,
    SequenceFlags,
    TensorModel,
)
from tengserve_backend.python_backend import PythonModel, load_python_model
from tengserve_backend.repository.scan import scan_repository

IO = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""
DECOUPLED = IO + "model_transaction_policy { decoupled: true }\n"


def write_model(root: Path, name: str, code: str, config: str = IO, files: Mapping[str, str] | None = None) -> None:
    """A model's folder; `files` are more of its files, by their path in the folder."""
    for path, text in {"1/model.py": code, "config.pbtxt": config, **(files or {})}.items():
        file = root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")


class Peers:
    """The models of a folder, as they ask for each other."""

    def __init__(self) -> None:
        self.models: dict[str, TensorModel] = {}
        self.changes: list[tuple[object, ...]] = []

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        if name not in self.models:
            raise ModelNotFoundError(f"no {name}")
        return self.models[name]

    def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        self.changes.append(("load", name, config_json, dict(files)))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.changes.append(("unload", name, unload_dependents))


@contextmanager
def loaded(root: Path, peers: Peers | None = None, **options: float) -> Iterator[dict[str, PythonModel]]:
    """Every model of a folder, until the end of the block."""
    known = peers or Peers()
    models: dict[str, PythonModel] = {}
    try:
        for source in scan_repository(root):
            models[source.name] = load_python_model(source, lambda stage, fraction: None, known, **options)
            known.models[source.name] = models[source.name]
        yield models
    finally:
        for model in models.values():
            model.stop()


@contextmanager
def model(
    root: Path, code: str, config: str = IO, files: Mapping[str, str] | None = None, **options: float
) -> Iterator[PythonModel]:
    """One model, "m"; `options` are those of load_python_model."""
    write_model(root, "m", code, config, files)
    with loaded(root, **options) as models:
        yield models["m"]


def fp32(name: str, *values: float, shape: tuple[int, ...] | None = None) -> InferTensor:
    data = np.array(values, np.float32)
    return InferTensor(name, Datatype.FP32, data if shape is None else data.reshape(shape))


def text(name: str, *values: bytes) -> InferTensor:
    return InferTensor(name, Datatype.BYTES, np.array(values, np.object_))


def ask(
    *tensors: InferTensor,
    request_id: str = "",
    outputs: tuple[str, ...] = (),
    parameters: Mapping[str, bool | int | float | str] | None = None,
    priority: int = 0,
    timeout_us: int = 0,
    sequence: SequenceFlags | None = None,
) -> InferRequest:
    return InferRequest(
        model="m",
        version="",
        request_id=request_id,
        inputs=tensors or (fp32("IN", 1, 2),),
        outputs=tuple(map(RequestedOutput, outputs)),
        parameters=parameters or {},
        priority=priority,
        timeout_us=timeout_us,
        sequence=sequence or SequenceFlags(),
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on a thread of the model; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - a thread of the host has no event to give
        await asyncio.sleep(0.001)


async def answers(model: TensorModel, request: InferRequest) -> list[InferResponse]:
    return [response async for response in model.infer(request)]


async def answer(model: TensorModel, request: InferRequest) -> InferResponse:
    (response,) = await answers(model, request)
    return response


async def first_output(model: TensorModel, request: InferRequest | None = None) -> list[object]:
    response = await answer(model, request or ask())
    made: list[object] = response.outputs[0].data.tolist()
    return made


async def queued(m: PythonModel, *requests: InferRequest) -> list[asyncio.Task[InferResponse]]:
    """These requests, waiting in this order."""
    tasks = []
    for request in requests:
        waiting = m.pending()
        task = asyncio.create_task(answer(m, request))
        tasks.append(task)
        await until(lambda before=waiting, task=task: m.pending() != before or task.done())
    return tasks
