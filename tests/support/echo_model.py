"""A model of tensors that answers with what it got, for whoever serves models without caring what they compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tengserve_backend.errors import ShuttingDownError
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    ModelStatistics,
    TensorSpec,
)
from tengserve_backend.repository.source import ModelSource


class EchoModel:
    """Implements TensorModel. The response says in its parameters which instance it was.

    Attributes:
        gate: while it is set to an event, responses wait for it.
        stops: how often it was stopped.
    """

    max_batch_size = 0
    decoupled = False
    platform = "python"

    def __init__(self, source: ModelSource, instance: int = 0) -> None:
        self.name = source.name
        self.version = source.version
        self.inputs = (TensorSpec("IN", Datatype.BYTES, (-1,)),)
        self.outputs = (TensorSpec("OUT", Datatype.BYTES, (-1,)),)
        self.gate: asyncio.Event | None = None
        self.ready = True
        self.stops = 0
        self._instance = instance
        self._running = 0
        self._draining = False
        self._answered = 0

    async def is_ready(self) -> bool:
        return self.ready

    def statistics(self) -> ModelStatistics:
        count = self._answered
        return ModelStatistics(inference_count=count, execution_count=count, success=(count, 1000 * count))

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        if self._draining:
            raise ShuttingDownError("The model is going away.")
        self._running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            self._answered += 1
            yield InferResponse(
                self.name, self.version, request.request_id, request.inputs, {"instance": self._instance}
            )
        finally:
            self._running -= 1

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        async with asyncio.timeout(timeout_s):
            while self._running:  # noqa: ASYNC110 - it may be awaited on another loop than the requests'
                await asyncio.sleep(0.001)
        return True

    def stop(self) -> None:
        self.stops += 1


def infer_request(model: str = "echo") -> InferRequest:
    return InferRequest(model, "", "r", ())
