"""The model class that the KServe model server hosts."""

from __future__ import annotations

from typing import Any, NoReturn

from tengserve_adapter.kserve.sdk import Model
from tengserve_backend.engine.base import Engine, Generation
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.manager import ModelManager, ModelState


class TengserveModel(Model):  # type: ignore[misc]  # kserve ships no type information
    """One model of the repository, all its versions, as KServe sees it.

    It generates natively: `generate` is what the routes of v2 generate, /infer and /infer_token come to. KServe's own
    `predict`, which v1 and v2 infer would call, is refused with the name of the route to use.
    """

    def __init__(self, name: str, models: ModelManager) -> None:
        self._models = models
        super().__init__(name)

    @property
    def ready(self) -> bool:
        """Whether a version of the model is loaded and its engine lives."""
        return any(status.state is ModelState.READY for status in self._models.statuses() if status.name == self.name)

    @ready.setter
    def ready(self, value: bool) -> None:
        """Does nothing: KServe assigns it in its constructor and hooks, and only the engine knows."""

    def load(self) -> bool:
        """Whether the model is ready; loading is the server's own background thread's work."""
        return self.ready

    def start(self) -> None:
        """Nothing: KServe's own would call the model ready."""

    def stop(self) -> None:
        """Nothing: the lifecycle drains and stops every engine in its order."""

    def engine_of(self, version: str | None = None) -> Engine:
        """The engine of a version, or of the newest version that is ready (`engine` is a flag of KServe's).

        Raises:
            ModelNotFoundError: no such version.
            ModelNotReadyError: it loads, or has failed to load.
        """
        return self._models.engine(self.name, version)

    async def generate(self, request: GenerationRequest, version: str | None = None) -> Generation:
        """Queue a request; the caller reads the events and aborts what it no longer wants.

        Raises:
            TengserveError: as `engine_of` and `Engine.submit` say.
        """
        return await self.engine_of(version).submit(request)

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> NoReturn:
        """Refuse KServe's v1 predict and v2 infer, naming the route that works."""
        raise NotImplementedError(
            f"This model generates text: use POST /v2/models/{self.name}/generate, /infer or /infer_token."
        )

    async def explain(self, payload: Any, headers: Any = None) -> NoReturn:
        """Refuse KServe's v1 explain."""
        raise NotImplementedError("This model has no explainer.")
