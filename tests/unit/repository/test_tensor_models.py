"""Models of tensors beside engines: looked up, replaced and unloaded like them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.echo_model import EchoModel, infer_request
from support.scripted_model import scripted_engine
from tengserve_backend.engine.base import Engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import InvalidRequestError, ModelNotFoundError, ModelNotReadyError
from tengserve_backend.inference import TensorModel
from tengserve_backend.repository.manager import ModelManager, ModelState
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import Backend, ModelSource, Progress

A_WHILE = 30.0


def source(name: str, version: str = "1", backend: Backend = Backend.PYTHON) -> ModelSource:
    return ModelSource(name, version, Path(name, version), ModelSettings(), backend, {"name": name})


class Loader:
    def __init__(self) -> None:
        self.made: list[EchoModel] = []
        self.released: list[ModelSource] = []
        self.stopped = threading.Event()

    def __call__(self, source: ModelSource, progress: Progress) -> NativeEngine | EchoModel:
        if source.backend is Backend.TENGSERVE:
            return scripted_engine(lambda position, last: ord("A"), name=source.name)
        self.made.append(EchoModel(source, len(self.made)))
        return self.made[-1]

    def release(self, source: ModelSource) -> None:
        self.released.append(source)
        self.stopped.set()


class NamedTensors(EchoModel):
    """What an engine is shown as."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(source(engine.info.name))
        self.engine = engine


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def start(loader: Loader) -> Iterator[Callable[..., ModelManager]]:
    managers: list[ModelManager] = []

    def build(*sources: ModelSource) -> ModelManager:
        managers.append(ModelManager(sources, loader, as_tensors=NamedTensors, released=loader.release))
        managers[-1].load_all()
        return managers[-1]

    yield build
    for manager in managers:
        manager.stop()


async def instance(model: TensorModel) -> object:
    (response,) = [response async for response in model.infer(infer_request())]
    return response.parameters["instance"]


async def test_engines_and_tensor_models_are_found_under_their_kind(start):
    manager = start(source("echo"), source("story", backend=Backend.TENGSERVE))
    assert [status.state for status in manager.statuses()] == [ModelState.READY] * 2
    assert await instance(manager.tensor_model("echo")) == 0
    assert await instance(manager.tensor_model("echo", "1")) == 0
    with pytest.raises(InvalidRequestError, match=r'Model "echo" takes tensors: use POST /v2/models/echo/infer'):
        manager.engine("echo")
    shown = manager.tensor_model("story")
    assert isinstance(shown, NamedTensors)
    assert shown.engine.info == manager.engine("story").info
    with pytest.raises(ModelNotFoundError):
        manager.tensor_model("nobody")
    with pytest.raises(ModelNotFoundError):
        manager.tensor_model("echo", "2")
    assert manager.config("echo") == {"name": "echo"}


async def test_a_reload_answers_every_request(start, loader):
    manager = start(source("echo"))
    before = manager.tensor_model("echo")
    gate = loader.made[0].gate = asyncio.Event()
    running = asyncio.create_task(instance(before))
    await asyncio.sleep(0)
    await asyncio.to_thread(manager.load, source("echo"), wait_for_old=False)
    assert await instance(manager.tensor_model("echo")) == 1
    # Found before the reload, asked after it: the model that took over answers.
    while not loader.made[0]._draining:  # noqa: ASYNC110 - a thread makes it true, and sets no event
        await asyncio.sleep(0)
    assert await instance(before) == 1
    assert loader.made[0].stops == 0
    gate.set()
    assert await running == 0
    assert await asyncio.to_thread(loader.stopped.wait, A_WHILE)
    assert (loader.made[0].stops, loader.released) == (1, [source("echo")])


async def test_an_unload_drains_in_the_background(start, loader):
    manager = start(source("echo"), source("echo", "2"))
    gate = loader.made[0].gate = asyncio.Event()
    running = asyncio.create_task(instance(manager.tensor_model("echo")))
    await asyncio.sleep(0)
    await asyncio.to_thread(manager.unload, "echo", wait_for_old=False)
    assert {status.state for status in manager.statuses()} == {ModelState.UNLOADING}
    with pytest.raises(ModelNotReadyError, match='Model "echo" is unloading'):
        manager.tensor_model("echo")
    gate.set()
    assert await running == 0
    while not all(status.unloaded for status in manager.statuses()):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert [model.stops for model in loader.made] == [1, 1]
    manager.forget("echo")
    assert manager.statuses() == ()


def test_a_model_that_is_served_is_not_forgotten(start):
    manager = start(source("echo"))
    manager.forget("echo")
    manager.forget("nobody")
    assert [status.name for status in manager.statuses()] == ["echo"]


async def test_an_unloaded_model_is_the_default_only_when_there_is_no_other(start):
    manager = start(source("a"), source("b"))
    assert manager.default_name() is None
    await asyncio.to_thread(manager.unload, "a")
    assert manager.default_name() == "b"


def test_what_the_start_failed_to_load_is_remembered():
    def load(source: ModelSource, progress: Progress) -> EchoModel:
        if source.name == "bad":
            raise InvalidRequestError("broken")
        return EchoModel(source)

    manager = ModelManager([source("bad"), source("good")], load)
    manager.load_all()
    assert [(status.name, status.reason) for status in manager.start_failures()] == [("bad", "broken")]
    with pytest.raises(ModelNotReadyError):
        manager.load(source("bad"))
    manager.unload("bad")
    assert [(status.name, status.reason) for status in manager.start_failures()] == [("bad", "broken")]
    manager.stop()
