"""The KServe model class and repository over a ModelManager, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.scripted_server import ScriptedEngine
from support.tensor_models import PlainControl
from tengserve_adapter.kserve.model import TengserveModel
from tengserve_adapter.kserve.repository import TengserveModelRepository, TengserveRepositoryExtension
from tengserve_backend.errors import ModelNotFoundError, ModelNotReadyError
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource, Progress


def load(source: ModelSource, progress: Progress) -> ScriptedEngine:
    return ScriptedEngine(source)


@pytest.fixture
def manager() -> ModelManager:
    sources = [ModelSource("story", version, Path(), ModelSettings()) for version in ("1", "2")]
    return ModelManager(sources, load)


def test_a_model_is_ready_when_its_engine_is(manager: ModelManager) -> None:
    model = TengserveModel("story", manager)
    model.start()
    assert model.load() is False
    assert model.ready is False
    manager.load_all()
    assert model.ready is True
    model.stop()
    assert model.ready is True


async def test_a_model_generates_natively(manager: ModelManager) -> None:
    manager.load_all()
    model = TengserveModel("story", manager)
    assert model.engine_of().info.version == "2"
    assert model.engine_of("1").info.version == "1"
    generation = await model.generate(GenerationRequest("a", "Once"), "1")
    assert (await anext(generation)).text == "t1 "
    generation.abort()
    with pytest.raises(ModelNotFoundError):
        await model.generate(GenerationRequest("a", "Once"), "3")


async def test_generating_before_the_load_is_refused(manager: ModelManager) -> None:
    with pytest.raises(ModelNotReadyError):
        await TengserveModel("story", manager).generate(GenerationRequest("a", "Once"))


async def test_predict_names_the_route_that_works(manager: ModelManager) -> None:
    with pytest.raises(NotImplementedError, match="/v2/models/story/generate"):
        await TengserveModel("story", manager).predict({"instances": []})


async def test_kserve_sees_the_models_of_the_manager(manager: ModelManager) -> None:
    repository = TengserveModelRepository(manager)
    assert list(repository.get_models()) == ["story"]
    assert repository.get_model("story") is repository.get_model("story")
    assert repository.default_name() == "story"
    assert await repository.is_model_ready("story") is False
    manager.load_all()
    assert await repository.is_model_ready("story") is True
    assert repository.engine("story", "1").info is manager.engine("story", "1").info
    with pytest.raises(ModelNotFoundError):
        repository.engine("novel")
    with pytest.raises(NotImplementedError):
        repository.unload("story")
    assert list(repository.get_models()) == ["story"]


async def test_what_kserve_loads_and_unloads_goes_through_model_control(manager: ModelManager) -> None:
    control = PlainControl()
    extension = TengserveRepositoryExtension(TengserveModelRepository(manager), control)
    await extension.load("story")
    await extension.unload("story")
    assert control.told == [("load", "story", None, {}), ("unload", "story", False)]


async def test_kserve_sees_models_that_are_loaded_later_and_none_that_is_gone(manager: ModelManager) -> None:
    repository = TengserveModelRepository(manager)
    manager.load_all()
    manager.load(ModelSource("novel", "1", Path(), ModelSettings()))
    assert sorted(repository.get_models()) == ["novel", "story"]
    assert await repository.is_model_ready("novel") is True
    await asyncio.to_thread(manager.unload, "story")
    assert await repository.is_model_ready("story") is False
    manager.forget("story")
    assert list(repository.get_models()) == ["novel"]
