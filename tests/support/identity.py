"""Small models of tensors, for tests of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    ModelStatistics,
    ParameterValue,
    TensorSpec,
)


@dataclass
class IdentityModel:
    """Answers with its inputs under the names of its outputs.

    Attributes:
        scripted: responses to send in their place, as parameters and outputs.
        error: raised after them.
        gate: waited for before the answer.
        requests: what was asked.
        began, closed: set when a request came, and when it ended, however it did.
    """

    name: str = "identity"
    inputs: tuple[TensorSpec, ...] = (TensorSpec("IN", Datatype.INT32, (-1,)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("OUT", Datatype.INT32, (-1,)),)
    max_batch_size: int = 0
    decoupled: bool = False
    version: str = "1"
    platform: str = "python"
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    scripted: Sequence[tuple[InferTensor, ...]] | None = None
    error: Exception | None = None
    gate: asyncio.Event | None = None
    requests: list[InferRequest] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.requests.append(request)
        self.began.set()
        try:
            for index, outputs in enumerate(self._answers(request)):
                if self.gate is not None:
                    await self.gate.wait()
                final = self.error is None and index == len(self._answers(request)) - 1
                yield InferResponse(self.name, "1", request.request_id, outputs, self.parameters, final)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()

    def _answers(self, request: InferRequest) -> Sequence[tuple[InferTensor, ...]]:
        if self.scripted is not None:
            return self.scripted
        pairs = zip(request.inputs, self.outputs, strict=False)
        return [tuple(InferTensor(spec.name, tensor.datatype, tensor.data) for tensor, spec in pairs)]

    async def is_ready(self) -> bool:
        return True

    def statistics(self) -> ModelStatistics:
        return ModelStatistics()

    async def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        return


def identity(datatype: Datatype, shape: tuple[int, ...] = (-1,), **fields: int) -> IdentityModel:
    """An identity of one tensor."""
    spec = TensorSpec("IN", datatype, shape)
    return IdentityModel(inputs=(spec,), outputs=(TensorSpec("OUT", datatype, shape),), **fields)


def texts(name: str, *items: str) -> InferTensor:
    """A BYTES tensor."""
    data = np.empty(len(items), np.object_)
    data[:] = [item.encode() for item in items]
    return InferTensor(name, Datatype.BYTES, data)
