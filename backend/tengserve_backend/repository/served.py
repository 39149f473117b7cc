"""A model as its users get it: a request that meets a reload or an unload goes where its model is served now."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from tengserve_backend.engine.base import Engine, EngineStatus, Generation, ModelInfo
from tengserve_backend.errors import ShuttingDownError
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.inference import InferRequest, InferResponse, ModelStatistics, TensorModel, TensorSpec
from tengserve_backend.inference.unary import infer_once


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


class ServedTensorModel:
    """See inference.model.TensorModel; made for one lookup, like ServedEngine.

    Args:
        model: what was found.
        find: looks the model up once more.
    """

    def __init__(self, model: TensorModel, find: Callable[[], TensorModel]) -> None:
        self._model = model
        self._find = find

    @property
    def name(self) -> str:
        """See TensorModel."""
        return self._model.name

    @property
    def version(self) -> str:
        """See TensorModel."""
        return self._model.version

    @property
    def platform(self) -> str:
        """See TensorModel."""
        return self._model.platform

    @property
    def max_batch_size(self) -> int:
        """See TensorModel."""
        return self._model.max_batch_size

    @property
    def decoupled(self) -> bool:
        """See TensorModel."""
        return self._model.decoupled

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """See TensorModel."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """See TensorModel."""
        return self._model.outputs

    async def is_ready(self) -> bool:
        """See TensorModel."""
        return await self._model.is_ready()

    def statistics(self) -> ModelStatistics:
        """See TensorModel."""
        return self._model.statistics()

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """See TensorModel.

        Raises:
            ModelNotReadyError: the model is being unloaded.
        """
        while True:
            began = False
            responses = self._model.infer(request)
            try:
                async for response in responses:
                    began = True
                    yield response
            except ShuttingDownError:
                successor = self._find()
                if began or successor is self._model:
                    raise
                self._model = successor
            else:
                return
            finally:
                # Whoever closes this iterator means the model's own.
                close = getattr(responses, "aclose", None)
                if close is not None:
                    await close()

    async def infer_whole(self, request: InferRequest) -> InferResponse:
        """See inference.unary.AnswersWhole. A model refuses a request before it begins, so asking once more is safe.

        Raises:
            ModelNotReadyError: the model is being unloaded.
        """
        while True:
            try:
                return await infer_once(self._model, request)
            except ShuttingDownError:
                successor = self._find()
                if successor is self._model:
                    raise
                self._model = successor

    async def drain(self, timeout_s: float) -> bool:
        """See Servable."""
        return await self._model.drain(timeout_s)

    def stop(self) -> None:
        """See Servable."""
        self._model.stop()
