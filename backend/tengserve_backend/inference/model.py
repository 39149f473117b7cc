"""What the adapter sees of a model that takes tensors: a user's model.py, or the LLM behind its tensor names."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tengserve_backend.inference.datatypes import Datatype
from tengserve_backend.inference.request import InferRequest, InferResponse


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name, datatype: of the tensor.
        shape: dimensions as clients see them, -1 for any; the batch dimension comes first when there is one.
        optional: an input that may be left out.
        labels: class labels of an output, "" where a class has none.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Calls of a model with one batch size; durations in nanoseconds, of all of them together.

    Attributes:
        batch_size: what the requests of a call sum up to.
        count: calls that came back.
        compute_input_ns, compute_infer_ns, compute_output_ns: before, in and after the model's own code.
    """

    batch_size: int
    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclass(frozen=True, slots=True)
class ResponseStatistics:
    """The first responses of all requests to a decoupled model, or the second ones, and so on.

    Attributes:
        compute_infer, compute_output: (count, nanoseconds) of making a response, since the one before it, and of
            handing it over.
        success, fail, empty_response, cancel: (count, nanoseconds) of responses with outputs, with an error, of those
            that only say that they are the last, and of those that nobody waited for any more.
    """

    compute_infer: tuple[int, int] = (0, 0)
    compute_output: tuple[int, int] = (0, 0)
    success: tuple[int, int] = (0, 0)
    fail: tuple[int, int] = (0, 0)
    empty_response: tuple[int, int] = (0, 0)
    cancel: tuple[int, int] = (0, 0)


class FailureReason(enum.Enum):
    """Why a request failed, in Triton's terms; what was cancelled is counted as such, and has no reason here."""

    REJECTED = enum.auto()
    """The queue was full, or the request's time passed while it waited."""
    BACKEND = enum.auto()
    """The model failed, or answered with an error."""
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Triton's statistics of one model version, durations in nanoseconds; counted since it was loaded.

    Attributes:
        inference_count: requests times their batch.
        execution_count: calls of the model.
        last_inference_ms: wall clock milliseconds of the last request, 0 before the first.
        success, fail, queue, compute_input, compute_infer, compute_output, cancel: (count, nanoseconds) each.
        batches: by batch size, ascending; empty where requests are not batched by their shape.
        responses: of a decoupled python model, by the response's place in its request.
        failures: the count of `fail` by reason; a reason without any may be missing.
        pending: requests that wait for the model now.
    """

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: tuple[int, int] = (0, 0)
    fail: tuple[int, int] = (0, 0)
    queue: tuple[int, int] = (0, 0)
    compute_input: tuple[int, int] = (0, 0)
    compute_infer: tuple[int, int] = (0, 0)
    compute_output: tuple[int, int] = (0, 0)
    cancel: tuple[int, int] = (0, 0)
    batches: tuple[BatchStatistics, ...] = ()
    responses: tuple[ResponseStatistics, ...] = ()
    failures: Mapping[FailureReason, int] = field(default_factory=dict)
    pending: int = 0


class Servable(Protocol):
    """What the model manager needs of anything that it serves; engine.base.Engine is one too."""

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and wait for what runs; False when the time ran out first."""
        ...

    def stop(self) -> None:
        """End everything and give the memory back. Blocks until done."""
        ...


class TensorModel(Servable, Protocol):
    """One loaded version of a model that takes and gives tensors."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> str:
        """The version."""
        ...

    @property
    def platform(self) -> str:
        """Platform, or backend where config.pbtxt names no platform."""
        ...

    @property
    def max_batch_size(self) -> int:
        """0: no batch dimension."""
        ...

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """In the order of the configuration."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """In the order of the configuration."""
        ...

    async def is_ready(self) -> bool:
        """Whether it would take a request now."""
        ...

    def statistics(self) -> ModelStatistics:
        """Since it was loaded."""
        ...

    def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """Run a request; the last response has `final`. Closing the iterator cancels what is not done.

        Raises:
            InvalidRequestError: the tensors do not fit the model.
            TengserveError: as the tree says.
        """
        ...


@runtime_checkable
class Configured(Protocol):
    """A model that completes its own configuration while it loads; a TensorModel may be one."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration in Triton's JSON form, see repository.config_json; not to be changed."""
        ...


@runtime_checkable
class MayFail(Protocol):
    """A model that may go out of service by itself; a TensorModel may be one."""

    @property
    def failure(self) -> str:
        """Why it serves no more, in a sentence for clients; "" while it does."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A model that knows what it owes; a TensorModel may be one."""

    def unanswered(self) -> int:
        """Requests that somebody waits for: those that were given up do not count, whatever they still do."""
        ...
