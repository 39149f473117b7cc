"""One response for one request, whatever the model sends: what unary infer needs of a decoupled model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tengserve_backend.errors import GenerationFailedError
from tengserve_backend.inference.datatypes import Datatype
from tengserve_backend.inference.model import TensorModel
from tengserve_backend.inference.request import InferRequest, InferResponse, InferTensor, ParameterValue

MAX_JOINED_BYTES = 256 * 1024 * 1024
"""Most that is kept of the responses of one request before they are joined."""


@runtime_checkable
class AnswersWhole(Protocol):
    """A model that makes its one response itself: it has no more than one, or knows better than `join`."""

    async def infer_whole(self, request: InferRequest) -> InferResponse:
        """As TensorModel.infer, with one response."""
        ...


@asynccontextmanager
async def closing(responses: AsyncIterator[InferResponse]) -> AsyncIterator[AsyncIterator[InferResponse]]:
    """The iterator, closed at the end: that cancels what is not done. An iterator that cannot be closed is left."""
    try:
        yield responses
    finally:
        close = getattr(responses, "aclose", None)
        if close is not None:
            await close()


def infer_once(model: TensorModel, request: InferRequest) -> Coroutine[Any, Any, InferResponse]:
    """The model's response, to be awaited; those of a decoupled model are joined.

    Raises:
        GenerationFailedError: there was none, or too much to join.
        TengserveError: the model's own.
    """
    # No isinstance: with a protocol it takes longer than a small request does.
    whole: Callable[[InferRequest], Coroutine[Any, Any, InferResponse]] | None = getattr(model, "infer_whole", None)
    return infer_joined(model, request) if whole is None else whole(request)


async def infer_joined(model: TensorModel, request: InferRequest) -> InferResponse:
    """The responses that `model.infer` gives, joined; raises as `infer_once` does."""
    responses: list[InferResponse] = []
    size = 0
    # Closing the iterator is what cancels the request when the caller is cancelled or the model sends too much.
    async with closing(model.infer(request)) as answers:
        async for response in answers:
            if response.outputs or response.parameters or not responses:
                responses.append(response)
            size += sum(tensor.size_bytes for tensor in response.outputs)
            if size > MAX_JOINED_BYTES:
                raise GenerationFailedError(
                    f"Model {model.name} sent more than {MAX_JOINED_BYTES} bytes, too much for one response."
                )
    if not responses:
        raise GenerationFailedError(f"Model {model.name} sent no response.")
    return join(responses)


def join(responses: list[InferResponse]) -> InferResponse:
    """Responses of one request as one: texts of one element are joined to a text, other tensors along their first
    dimension; of equal parameters the last wins.

    Raises:
        GenerationFailedError: tensors of one name do not fit together.
    """
    if len(responses) == 1:
        return responses[0]
    parts: dict[str, list[InferTensor]] = {}
    parameters: dict[str, ParameterValue] = {}
    for response in responses:
        parameters.update(response.parameters)
        for tensor in response.outputs:
            parts.setdefault(tensor.name, []).append(tensor)
    first = responses[0]
    outputs = tuple(_joined(tensors) for tensors in parts.values())
    return InferResponse(first.model, first.version, first.request_id, outputs, parameters)


def _joined(tensors: list[InferTensor]) -> InferTensor:
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if first.datatype is Datatype.BYTES and all(tensor.data.size == 1 for tensor in tensors):
        data = np.empty(1, np.object_)
        data[0] = b"".join(_bytes(tensor.data.reshape(-1)[0]) for tensor in tensors)
        return InferTensor(first.name, first.datatype, data.reshape(first.shape), first.parameters)
    try:
        joined = np.concatenate([np.atleast_1d(tensor.data) for tensor in tensors])
    except ValueError:
        raise GenerationFailedError(
            f"The responses of the model do not fit together: output {first.name} changes its shape."
        ) from None
    return InferTensor(first.name, first.datatype, joined, first.parameters)


def _bytes(item: object) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()
