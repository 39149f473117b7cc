"""The models while the server runs, with engines that only remember what was done to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine_status import engine_status
from tengserve_backend.engine.base import EngineStatus, Generation, ModelInfo
from tengserve_backend.errors import ConfigurationError, ModelNotFoundError, ModelNotReadyError
from tengserve_backend.generation import GenerationRequest, ModelLimits
from tengserve_backend.repository.manager import ModelManager, ModelState
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource, Progress


class FakeEngine:
    def __init__(self, source: ModelSource) -> None:
        limits = ModelLimits(max_seq_len=8, max_input_len=8, max_iter_times=8)
        self.info = ModelInfo(source.name, source.version, "Fake", 8, limits, False, "cpu", "float32", "none")
        self.failure: str | None = None
        self.stops = 0
        self.drained_within: float | None = None
        self.drains = True

    async def submit(self, request: GenerationRequest) -> Generation:
        raise NotImplementedError

    def status(self) -> EngineStatus:
        return engine_status(failure=self.failure)

    async def drain(self, timeout_s: float) -> bool:
        self.drained_within = timeout_s
        return self.drains

    def stop(self) -> None:
        self.stops += 1
        if self.failure:
            raise RuntimeError("the device is gone")


class Loader:
    """Makes fake engines and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeEngine] = []

    def __call__(self, source: ModelSource, progress: Progress) -> FakeEngine:
        progress("loading", 0.5)
        self.made.append(FakeEngine(source))
        return self.made[-1]


def source(name: str, version: str = "1") -> ModelSource:
    return ModelSource(name, version, Path(name, version), ModelSettings())


def states(manager: ModelManager) -> list[tuple[str, str, ModelState]]:
    return [(status.name, status.version, status.state) for status in manager.statuses()]


def load(source: ModelSource, progress: Progress) -> FakeEngine:
    progress("loading", 0.5)
    return FakeEngine(source)


def failing(error: Exception) -> Callable[[ModelSource, Progress], FakeEngine]:
    def load(source: ModelSource, progress: Progress) -> FakeEngine:
        if source.name == "bad":
            raise error
        return FakeEngine(source)

    return load


def test_models_are_loading_until_they_are_loaded() -> None:
    seen: list[tuple[str, str, float]] = []
    manager = ModelManager([source("a")], load, lambda *report: seen.append(report))
    assert states(manager) == [("a", "1", ModelState.LOADING)]
    with pytest.raises(ModelNotReadyError, match='Model "a" is loading'):
        manager.engine("a")
    manager.load_all()
    assert states(manager) == [("a", "1", ModelState.READY)]
    assert manager.engine("a").info.name == "a"
    assert seen == [("a", "loading", 0.5)]


def test_a_request_without_a_version_gets_the_newest_that_is_ready() -> None:
    def load(source: ModelSource, progress: Progress) -> FakeEngine:
        if source.version == "10":
            raise ConfigurationError("broken")
        return FakeEngine(source)

    manager = ModelManager([source("a", "2"), source("a", "10"), source("a", "9")], load)
    manager.load_all()
    assert [status.version for status in manager.statuses()] == ["10", "9", "2"]
    assert manager.engine("a").info.version == "9"
    assert manager.engine("a", "2").info.version == "2"
    with pytest.raises(ModelNotReadyError, match="broken"):
        manager.engine("a", "10")


def test_unknown_models_and_versions_are_not_found() -> None:
    manager = ModelManager([source("a")], load)
    manager.load_all()
    with pytest.raises(ModelNotFoundError, match='no model "b"'):
        manager.engine("b")
    with pytest.raises(ModelNotFoundError, match='"a" has no version "2"'):
        manager.engine("a", "2")
    with pytest.raises(ModelNotFoundError) as caught:
        manager.engine("x" * 100_000, "y" * 100_000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigurationError("parameter weights: there is no such file"), "parameter weights: there is no such file"),
        (RuntimeError("/a/path and a secret"), "The model failed to load; the server's log says why."),
    ],
)
def test_a_model_that_fails_is_recorded_and_the_others_load(error: Exception, reason: str) -> None:
    manager = ModelManager([source("bad"), source("good")], failing(error))
    manager.load_all()
    bad, good = manager.statuses()
    assert (bad.state, bad.reason) == (ModelState.UNAVAILABLE, reason)
    assert (good.state, good.reason) == (ModelState.READY, "")
    with pytest.raises(ModelNotReadyError):
        manager.engine("bad")


def test_a_dead_engine_makes_its_model_unavailable() -> None:
    loader = Loader()
    manager = ModelManager([source("a")], loader)
    manager.load_all()
    loader.made[0].failure = "The device is gone."
    (status,) = manager.statuses()
    assert (status.state, status.reason) == (ModelState.UNAVAILABLE, "The device is gone.")


def test_the_default_is_the_only_model() -> None:
    assert ModelManager([source("a", "1"), source("a", "2")], load).default_name() == "a"
    assert ModelManager([source("a"), source("b")], load).default_name() is None


async def test_drain_asks_every_engine_and_tells_when_one_did_not_finish() -> None:
    loader = Loader()
    manager = ModelManager([source("a"), source("b")], loader)
    manager.load_all()
    assert await manager.drain(3.0)
    assert [engine.drained_within for engine in loader.made] == [3.0, 3.0]
    loader.made[1].drains = False
    assert not await manager.drain(3.0)


async def test_drain_of_nothing_is_done() -> None:
    assert await asyncio.wait_for(ModelManager([source("a")], load).drain(3.0), 5)


def test_stop_stops_every_engine_once_even_if_one_fails() -> None:
    loader = Loader()
    manager = ModelManager([source("a"), source("b")], loader)
    manager.load_all()
    loader.made[0].failure = "gone"
    manager.stop()
    manager.stop()
    assert [engine.stops for engine in loader.made] == [1, 1]
    assert {status.state for status in manager.statuses()} == {ModelState.UNAVAILABLE}
    with pytest.raises(ModelNotReadyError, match="The server is stopping"):
        manager.engine("a")


def test_a_model_that_hangs_while_it_stops_takes_no_time_of_the_others() -> None:
    loader = Loader()
    manager = ModelManager([source("a"), source("b")], loader)
    manager.load_all()
    released, stopped = threading.Event(), threading.Event()
    hanging, quick = loader.made

    def hang() -> None:
        assert released.wait(30)

    hanging.stop, quick.stop = hang, stopped.set
    thread = threading.Thread(target=manager.stop)
    thread.start()
    assert stopped.wait(30)
    until(lambda: manager.stopping() == ("a",))
    released.set()
    thread.join(30)
    assert manager.stopping() == ()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_stop_ends_a_running_load_at_its_next_report() -> None:
    started, stopped = threading.Event(), threading.Event()
    made: list[FakeEngine] = []

    def load(source: ModelSource, progress: Progress) -> FakeEngine:
        started.set()
        assert stopped.wait(30)
        progress("loading", 0.5)
        made.append(FakeEngine(source))
        return made[-1]

    manager = ModelManager([source("a"), source("b")], load)
    thread = threading.Thread(target=manager.load_all)
    thread.start()
    assert started.wait(30)
    manager.stop()
    stopped.set()
    thread.join(30)
    assert not thread.is_alive()
    assert made == []
    assert {status.state for status in manager.statuses()} == {ModelState.UNAVAILABLE}


def test_an_engine_that_is_made_after_the_stop_is_stopped() -> None:
    made: list[FakeEngine] = []

    def load(source: ModelSource, progress: Progress) -> FakeEngine:
        manager.stop()
        made.append(FakeEngine(source))
        return made[-1]

    manager = ModelManager([source("a"), source("b")], load)
    manager.load_all()
    assert [engine.stops for engine in made] == [1]


def test_what_takes_too_long_to_end_is_stopped_with_its_engine() -> None:
    loader = Loader()
    manager = ModelManager([source("a")], loader)
    manager.load_all()
    loader.made[0].drains = False
    manager.load(source("a"), retire_timeout_s=0.5)
    loader.made[1].drains = False
    manager.unload("a", retire_timeout_s=0.25)
    assert [(engine.drained_within, engine.stops) for engine in loader.made] == [(0.5, 1), (0.25, 1)]


def test_the_start_is_over_when_every_model_was_tried() -> None:
    manager = ModelManager([source("bad"), source("good")], failing(ConfigurationError("broken")))
    assert not manager.started()
    manager.load_all()
    assert manager.started()


def test_a_model_that_was_loaded_by_request_is_not_loaded_again_by_the_start() -> None:
    loader = Loader()
    manager = ModelManager([source("a"), source("b"), source("c")], loader)
    manager.load(source("b"))
    manager.unload("c")
    manager.load_all()
    assert [engine.info.name for engine in loader.made] == ["b", "a"]
    assert states(manager)[2] == ("c", "1", ModelState.UNAVAILABLE)


def test_an_engine_that_is_replaced_while_it_is_asked_does_not_make_its_model_unavailable() -> None:
    class Replaced(FakeEngine):
        def status(self) -> EngineStatus:
            manager.load(source("a"))
            self.failure = "stopped"
            return super().status()

    engines = iter([Replaced, FakeEngine])
    manager = ModelManager([source("a")], lambda source, progress: next(engines)(source))
    manager.load_all()
    assert states(manager) == [("a", "1", ModelState.READY)]
