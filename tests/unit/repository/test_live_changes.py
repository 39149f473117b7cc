"""Loading and unloading while the server runs: nobody else notices, and no request fails."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.scripted_model import scripted_engine
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import (
    ConfigurationError,
    ModelNotFoundError,
    ModelNotReadyError,
    ShuttingDownError,
)
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.manager import ModelManager, ModelState
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource, Progress

A_WHILE = 60.0


def source(name: str, version: str = "1", **settings: int) -> ModelSource:
    return ModelSource(name, version, Path(name, version), dataclasses.replace(ModelSettings(), **settings))


class Gate:
    """Where a thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self._reached.release()
        assert self._open.wait(A_WHILE)

    def reached(self) -> None:
        assert self._reached.acquire(timeout=A_WHILE)

    def open(self) -> None:
        self._open.set()


class Loader:
    """Makes scripted engines. The n-th engine of the n-th load says the n-th letter for ever."""

    def __init__(self) -> None:
        self.made: list[NativeEngine] = []
        self.asked: list[ModelSource] = []
        self.gates: dict[str, Gate] = {}
        self.step_gates: dict[str, Gate] = {}
        self.failure: Exception | None = None

    def __call__(self, source: ModelSource, progress: Progress) -> NativeEngine:
        self.asked.append(source)
        if gate := self.gates.get(source.name):
            gate()
        progress("loading", 0.5)
        if self.failure is not None:
            raise self.failure
        letter = ord("A") + len(self.made)
        step_gate = self.step_gates.pop(source.name, None)

        def before_step(ids: object) -> None:
            if step_gate is not None:
                step_gate()

        self.made.append(scripted_engine(lambda position, last: letter, name=source.name, before_step=before_step))
        return self.made[-1]


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def start(loader: Loader) -> Iterator[Callable[..., ModelManager]]:
    """A manager whose first models are loaded."""
    managers: list[ModelManager] = []

    def build(*sources: ModelSource) -> ModelManager:
        managers.append(ModelManager(sources, loader))
        managers[-1].load_all()
        return managers[-1]

    yield build
    for manager in managers:
        manager.stop()


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def state(manager: ModelManager, name: str, version: str = "1") -> tuple[ModelState, str]:
    (status,) = (status for status in manager.statuses() if (status.name, status.version) == (name, version))
    return status.state, status.reason


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(A_WHILE):
        while not check():  # noqa: ASYNC110 - other threads make it true, and they set no event
            await asyncio.sleep(0)


async def says(manager: ModelManager, name: str, version: str | None = None, count: int = 3) -> str:
    generation = await manager.engine(name, version).submit(GenerationRequest("r", "p", max_new_tokens=count))
    return "".join([event.text async for event in generation])


async def test_a_new_model_is_loaded_beside_the_others(start, loader, workers):
    manager = start(source("first"))
    gate = loader.gates["second"] = Gate()
    loading = workers.submit(manager.load, source("second"))
    await asyncio.to_thread(gate.reached)
    assert state(manager, "second") == (ModelState.LOADING, "")
    with pytest.raises(ModelNotReadyError, match='Model "second" is loading'):
        manager.engine("second")
    assert await says(manager, "first") == "AAA"
    assert manager.started()
    gate.open()
    await asyncio.wrap_future(loading)
    assert (await says(manager, "first"), await says(manager, "second")) == ("AAA", "BBB")
    assert manager.default_name() is None


async def test_a_load_does_not_stop_a_stream_of_another_model(start, loader, workers):
    manager = start(source("first"))
    generation = await manager.engine("first").submit(GenerationRequest("r", "p", max_new_tokens=400))
    await anext(generation)
    gate = loader.gates["second"] = Gate()
    loading = workers.submit(manager.load, source("second"))
    await asyncio.to_thread(gate.reached)
    # The load is held; the whole rest of the stream comes all the same.
    rest = [event.text async for event in generation]
    assert len(rest) == 399
    gate.open()
    await asyncio.wrap_future(loading)


async def test_two_models_answer_at_the_same_time(start, loader):
    held = loader.step_gates["held"] = Gate()
    manager = start(source("held"), source("free"))
    waiting = asyncio.create_task(says(manager, "held"))
    await asyncio.to_thread(held.reached)
    # One model is in the middle of a step, and the other one answers.
    assert await says(manager, "free") == "AAA"
    held.open()
    assert await waiting == "BBB"


class CountedSource(ModelSource):
    """Tells when it is compared with the source of the load that runs: then its own load has joined that one."""

    compared = threading.Semaphore(0)

    def __eq__(self, other: object) -> bool:
        self.compared.release()
        return super().__eq__(other)

    __hash__ = ModelSource.__hash__


@pytest.mark.parametrize("failure", [None, ConfigurationError("parameter weights: there is no such folder or file")])
async def test_the_same_load_asked_for_by_many_is_done_once(start, loader, workers, failure):
    manager = start(source("first"))
    loader.failure = failure
    gate = loader.gates["second"] = Gate()

    def load() -> None:
        manager.load(CountedSource("second", "1", Path(), ModelSettings()))

    loads = [workers.submit(load)]
    await asyncio.to_thread(gate.reached)
    loads += [workers.submit(load) for _ in range(4)]
    for _ in range(4):
        assert await asyncio.to_thread(CountedSource.compared.acquire, timeout=A_WHILE)
    gate.open()
    results = await asyncio.gather(*map(asyncio.wrap_future, loads), return_exceptions=True)
    assert [asked.name for asked in loader.asked] == ["first", "second"]
    if failure is None:
        assert results == [None] * 5
        assert await says(manager, "second") == "BBB"
        return
    assert [(type(error), str(error)) for error in results] == [(ModelNotReadyError, failure.message)] * 5
    assert state(manager, "second") == (ModelState.UNAVAILABLE, failure.message)
    loader.failure = None
    await asyncio.to_thread(load)
    assert state(manager, "second") == (ModelState.READY, "")


async def test_an_unknown_failure_tells_nothing_private(start, loader):
    manager = start()
    loader.failure = RuntimeError("/a/path and a secret")
    with pytest.raises(ModelNotReadyError, match=r"failed to load; the server's log says why\.$"):
        await asyncio.to_thread(manager.load, source("bad"))


async def test_a_reload_takes_over_and_the_old_answers_are_completed(start, loader, workers):
    held = loader.step_gates["a"] = Gate()
    manager = start(source("a"))
    old = asyncio.create_task(says(manager, "a", count=5))
    await asyncio.to_thread(held.reached)
    gate = loader.gates["a"] = Gate()
    reloading = workers.submit(manager.load, source("a", max_batch_size=4))
    await asyncio.to_thread(gate.reached)
    assert state(manager, "a") == (ModelState.READY, "")
    gate.open()
    # New requests get the new engine as soon as it is there, while the old one still holds its answer.
    await until(lambda: not manager.engine("a").status().running_requests)
    assert await says(manager, "a") == "BBB"
    assert not old.done()
    held.open()
    assert await old == "AAAAA"
    await asyncio.wrap_future(reloading)
    assert [engine.status().alive for engine in loader.made] == [False, True]


async def test_a_request_between_lookup_and_submit_survives_a_reload(start):
    manager = start(source("a"))
    engine = manager.engine("a")
    await asyncio.to_thread(manager.load, source("a"))
    generation = await engine.submit(GenerationRequest("r", "p", max_new_tokens=2))
    assert "".join([event.text async for event in generation]) == "BB"


async def test_an_engine_that_was_replaced_or_unloaded_has_not_died(start):
    manager = start(source("a"))
    engine = manager.engine("a")
    await asyncio.to_thread(manager.load, source("a"))
    assert engine.status().alive
    await asyncio.to_thread(manager.unload, "a")
    with pytest.raises(ModelNotReadyError, match="is unavailable: unloaded"):
        engine.status()


async def test_no_request_fails_over_many_reloads(start, workers):
    manager = start(source("a"))
    done = threading.Event()

    def reload() -> None:
        try:
            for _ in range(5):
                manager.load(source("a"))
        finally:
            done.set()

    reloading = workers.submit(reload)
    answers: list[str] = []
    while not done.is_set():
        answers += await asyncio.gather(*(says(manager, "a") for _ in range(4)))
    await asyncio.wrap_future(reloading)
    answers.append(await says(manager, "a"))
    assert all(len(answer) == 3 and len(set(answer)) == 1 for answer in answers)
    assert answers[-1] == "FFF"


async def test_a_failed_reload_leaves_the_old_engine(start, loader):
    manager = start(source("a"))
    loader.failure = ConfigurationError("broken")
    with pytest.raises(ModelNotReadyError, match="broken"):
        await asyncio.to_thread(manager.load, source("a"))
    assert state(manager, "a") == (ModelState.READY, "")
    assert await says(manager, "a") == "AAA"


async def test_unloading_completes_what_runs_and_refuses_what_comes(start, loader, workers):
    held = loader.step_gates["a"] = Gate()
    manager = start(source("a"), source("b"))
    running = asyncio.create_task(says(manager, "a"))
    await asyncio.to_thread(held.reached)
    engine = manager.engine("a")
    unloading = workers.submit(manager.unload, "a")
    await until(lambda: state(manager, "a")[0] is ModelState.UNLOADING)
    with pytest.raises(ModelNotReadyError, match='Model "a" is unloading'):
        manager.engine("a")
    held.open()
    assert await running == "AAA"
    await asyncio.wrap_future(unloading)
    with pytest.raises(ModelNotReadyError, match='Model "a" is unavailable: unloaded'):
        await engine.submit(GenerationRequest("r", "p"))
    assert state(manager, "a") == (ModelState.UNAVAILABLE, "unloaded")
    assert not loader.made[0].status().alive
    assert await says(manager, "b") == "BBB"
    await asyncio.to_thread(manager.unload, "a")
    await asyncio.to_thread(manager.load, source("a"))
    assert await says(manager, "a") == "CCC"


async def test_without_a_version_all_versions_are_unloaded(start):
    manager = start(source("a", "1"), source("a", "2"), source("b"))
    await asyncio.to_thread(manager.unload, "a", "2")
    assert (await says(manager, "a"), state(manager, "a", "2")[0]) == ("BBB", ModelState.UNAVAILABLE)
    await asyncio.to_thread(manager.unload, "a")
    assert state(manager, "a", "1")[0] is ModelState.UNAVAILABLE
    for name, version in (("nobody", None), ("a", "3")):
        with pytest.raises(ModelNotFoundError):
            await asyncio.to_thread(manager.unload, name, version)


async def test_a_request_for_no_version_moves_on_when_its_version_is_unloaded(start):
    manager = start(source("a", "1"), source("a", "2"))
    engine = manager.engine("a")
    assert engine.info.name == "a"
    await asyncio.to_thread(manager.unload, "a", "2")
    generation = await engine.submit(GenerationRequest("r", "p", max_new_tokens=2))
    assert "".join([event.text async for event in generation]) == "BB"


async def test_stop_ends_loads_and_unloads_and_leaves_no_engine(start, loader, workers):
    held = loader.step_gates["a"] = Gate()
    manager = start(source("a"), source("b"))
    running = asyncio.create_task(says(manager, "a"))
    await asyncio.to_thread(held.reached)
    unloading = workers.submit(manager.unload, "a")
    await until(lambda: state(manager, "a")[0] is ModelState.UNLOADING)
    gate = loader.gates["c"] = Gate()
    loads = [workers.submit(manager.load, source("c"))]
    await asyncio.to_thread(gate.reached)
    loads.append(workers.submit(manager.load, source("c", max_batch_size=4)))
    stopping = workers.submit(manager.stop)
    await until(lambda: state(manager, "b")[0] is ModelState.UNAVAILABLE)
    held.open()
    gate.open()
    await asyncio.wrap_future(stopping)
    await asyncio.wrap_future(unloading)
    for load in loads:
        with pytest.raises((ShuttingDownError, ModelNotReadyError), match="stopping"):
            await asyncio.wrap_future(load)
    await asyncio.gather(running, return_exceptions=True)
    assert [engine.status().alive for engine in loader.made] == [False, False]
    with pytest.raises(ShuttingDownError):
        await asyncio.to_thread(manager.load, source("d"))
