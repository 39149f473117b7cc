"""An engine as its users get it: a request that meets a reload or an unload goes where its model is served now."""

from __future__ import annotations

from collections.abc import Callable

from tengserve_backend.engine.base import Engine, EngineStatus, Generation, ModelInfo
from tengserve_backend.errors import ShuttingDownError
from tengserve_backend.generation import GenerationRequest


class ServedEngine:
    """See engine.base.Engine. Made for one lookup, and as short-lived.

    Between the lookup and `submit` the model may have been loaded anew. The engine that was found then drains and
    refuses; the request is the client's all the same, so it goes to the engine that took over.

    Args:
        engine: what was found.
        find: looks the model up once more.
    """

    def __init__(self, engine: Engine, find: Callable[[], Engine]) -> None:
        self._engine = engine
        self._find = find

    @property
    def info(self) -> ModelInfo:
        """See Engine."""
        return self._engine.info

    async def submit(self, request: GenerationRequest) -> Generation:
        """See Engine.

        Raises:
            ModelNotReadyError: the model is being unloaded.
        """
        while True:
            try:
                return await self._engine.submit(request)
            except ShuttingDownError:
                successor = self._find()
                if successor is self._engine:
                    raise  # No reload: the server is on its way out.
                self._engine = successor

    def status(self) -> EngineStatus:
        """See Engine. An engine that was replaced or unloaded has not died: only who serves the model now counts.

        Raises:
            ModelNotReadyError: the model was unloaded.
        """
        while True:
            status = self._engine.status()
            if status.alive:
                return status
            serving = self._find()
            if serving is self._engine:
                return status
            self._engine = serving

    async def drain(self, timeout_s: float) -> bool:
        """See Engine."""
        return await self._engine.drain(timeout_s)

    def stop(self) -> None:
        """See Engine."""
        self._engine.stop()
