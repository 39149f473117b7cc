"""KServe's view of the model repository: the same models, and nothing that KServe could change behind our back."""

from __future__ import annotations

from typing import Any, NoReturn

from tengserve_adapter.control import ModelControl
from tengserve_adapter.kserve.model import TengserveModel
from tengserve_adapter.kserve.sdk import ModelRepository, ModelRepositoryExtension
from tengserve_backend.engine.base import Engine
from tengserve_backend.inference import TensorModel
from tengserve_backend.repository.manager import ModelManager, ModelStatus


class TengserveModelRepository(ModelRepository):  # type: ignore[misc]  # kserve ships no type information
    """The models of a ModelManager as KServe models: those of now, whenever they were loaded.

    It is also what our HTTP routes look models up in (`tengserve_adapter.http.models.Models`), so that KServe's routes
    and ours always speak of the same models.
    """

    def __init__(self, models: ModelManager) -> None:
        super().__init__()
        self._manager = models

    def get_model(self, name: str) -> Any:
        """The KServe model of this name, None when there is none."""
        return self.get_models().get(name)

    def get_models(self) -> dict[str, Any]:
        """Every KServe model by name: the manager's, and those that were registered beside them."""
        names = list(dict.fromkeys(status.name for status in self._manager.statuses()))
        for name in names:
            if name not in self.models:
                self.update(TengserveModel(name, self._manager))
        gone = [name for name, model in self.models.items() if isinstance(model, TengserveModel) and name not in names]
        for name in gone:
            del self.models[name]
        models: dict[str, Any] = self.models
        return models

    def engine(self, name: str, version: str | None = None) -> Engine:
        """See ModelManager."""
        return self._manager.engine(name, version)

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """See ModelManager."""
        return self._manager.tensor_model(name, version)

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Every version of every model."""
        return self._manager.statuses()

    def started(self) -> bool:
        """Whether every model that the server was started with has been tried."""
        return self._manager.started()

    def default_name(self) -> str | None:
        """The only model's name, or None when there are several."""
        return self._manager.default_name()

    def unload(self, name: str) -> NoReturn:
        """Refused: see TengserveRepositoryExtension."""
        raise NotImplementedError("Models are unloaded by the repository extension, which does not block.")


class TengserveRepositoryExtension(ModelRepositoryExtension):  # type: ignore[misc]  # kserve ships no type information
    """What KServe itself does to the repository, done by ModelControl like everybody else's requests."""

    def __init__(self, models: TengserveModelRepository, control: ModelControl) -> None:
        super().__init__(models)
        self._control = control

    async def load(self, model_name: str) -> None:
        """See ModelControl."""
        await self._control.load(model_name, None, {})

    async def unload(self, model_name: str) -> None:
        """See ModelControl."""
        await self._control.unload(model_name, unload_dependents=False)
