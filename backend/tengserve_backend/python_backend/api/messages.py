"""Requests and responses as a user's model sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tengserve_backend.errors import ModelExecutionError
from tengserve_backend.inference import InferRequest, InferResponse, ParameterValue, RequestedOutput, SequenceFlags
from tengserve_backend.python_backend.api.errors import TritonError, TritonModelException
from tengserve_backend.python_backend.api.tensor import Tensor
from tengserve_backend.python_backend.ticket import Ticket

if TYPE_CHECKING:
    from tengserve_backend.python_backend.api.sender import InferenceResponseSender

SEQUENCE_START, SEQUENCE_END = 1, 2
RELEASE_ALL = 1

MEMORY_GPU, MEMORY_CPU = 0, 1
MAX_MESSAGE_CHARS = 3500
"""Of an error that a model gives; more would not fit an error's body."""


class PreferredMemory:
    """Where a model wants the outputs of another; here they are on the CPU always."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request; there is none to follow."""

    def get_context(self) -> str | None:
        """The OpenTelemetry context; None without one."""
        return None


_NO_TRACE = InferenceTrace()


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, ParameterValue]:
    """A model's parameters as a dict.

    Raises:
        TritonModelException: a key or value has a type that the API does not take.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


class InferenceResponse:
    """One response.

    Args:
        output_tensors: the outputs.
        error: makes it an error; the outputs are not sent then.
        parameters: of the response.
    """

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        tensors = list(output_tensors)
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            if any(tensor is None for tensor in tensors):
                raise TritonModelException("Output tensor for inference response should not be empty.")
            raise TypeError("InferenceResponse takes output_tensors of type Tensor")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError("InferenceResponse takes an error of type TritonError")
        self._output_tensors = tensors
        self._error = error
        self._parameters = checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """The outputs."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """As a JSON object."""
        return json.dumps(self._parameters)

    @classmethod
    def from_infer(cls, response: InferResponse) -> InferenceResponse:
        """Of another model; not part of the API."""
        made = cls([Tensor.from_infer(tensor) for tensor in response.outputs])
        made._parameters = dict(response.parameters)
        return made

    def answer(self, ticket: Ticket, model: str, version: str, *, final: bool) -> None:
        """Send it; not part of the API.

        Raises:
            TritonModelException: an output does not have the shape that its `reshape` says, or an element no text.
            ModelExecutionError: see Ticket.takes.
        """
        if not final and (self._error is None or ticket.ended) and not ticket.takes():
            return
        if self._error is not None:
            ticket.fail(ModelExecutionError(self._error.message()[:MAX_MESSAGE_CHARS], code=self._error.code()))
            return
        tensors = self._output_tensors
        if ticket.request.outputs:
            wanted = {output.name for output in ticket.request.outputs}
            tensors = [tensor for tensor in tensors if tensor.name() in wanted]
        outputs = tuple([tensor.to_infer() for tensor in tensors])
        if ticket.reshapes:
            try:
                outputs = tuple(
                    ticket.reshapes[tensor.name].outward(tensor) if tensor.name in ticket.reshapes else tensor
                    for tensor in outputs
                )
            except ValueError as error:
                raise TritonModelException(str(error)) from None
        ticket.respond(InferResponse(model, version, ticket.request.request_id, outputs, self._parameters, final=final))


class InferenceRequest:
    """A request, from a client or for another model. The arguments are those of a request for another model.

    Args:
        request_id: chosen by the model.
        correlation_id: of a sequence, 0 or "" for none.
        inputs: the tensors.
        requested_output_names: outputs that are wanted; none asks for all.
        model_name: the other model.
        model_version: -1 is the newest.
        flags: of a sequence.
        timeout: microseconds, 0 for none.
        preferred_memory: has no effect.
        trace: has no effect.
        parameters: of the request.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, kind in (
            ("request_id", request_id, str),
            ("model_version", model_version, int),
            ("flags", flags, int),
            ("timeout", timeout, int),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"InferenceRequest takes a {name} of type {kind.__name__}, not {type(value).__name__}")
        if inputs is None or requested_output_names is None or model_name is None or correlation_id is None:
            raise TypeError(
                "InferenceRequest takes inputs, requested_output_names, model_name and correlation_id, not None"
            )
        if isinstance(correlation_id, bool) or not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if not all(isinstance(name, str) for name in requested_output_names):
            raise TypeError("InferenceRequest takes requested_output_names of type str")
        where = f"for request with id '{request_id}' and model name '{model_name}' should not be empty."
        if any(tensor is None for tensor in inputs):
            raise TritonModelException(f"Input tensor {where}")
        if not all(requested_output_names):
            raise TritonModelException(f"Requested output name {where}")
        self._inputs = list(inputs)
        self._output_names = list(requested_output_names)
        self._request = InferRequest(
            model=model_name,
            version="" if model_version < 0 else str(model_version),
            request_id=request_id,
            inputs=(),
            outputs=tuple(RequestedOutput(name) for name in requested_output_names),
            parameters=checked_parameters(parameters),
            timeout_us=timeout,
            sequence=SequenceFlags(correlation_id),
        )
        self._flags = flags
        self._preferred_memory = preferred_memory
        self._trace = trace or InferenceTrace()
        self._sender: InferenceResponseSender | None = None
        self._ticket: Ticket | None = None
        self.asked_for_sender = False

    @classmethod
    def received(cls, ticket: Ticket, sender: InferenceResponseSender, output_names: Sequence[str]) -> InferenceRequest:
        """What a client asked, of a model with these outputs; not part of the API."""
        made = cls.__new__(cls)
        request = ticket.request
        made._request = request
        made._output_names = [output.name for output in request.outputs] or list(output_names)
        made._inputs = [Tensor.from_infer(tensor) for tensor in request.inputs]
        made._flags = SEQUENCE_START * request.sequence.start | SEQUENCE_END * request.sequence.end
        made._preferred_memory = None
        made._trace = _NO_TRACE
        made._sender = sender
        made._ticket = ticket
        made.asked_for_sender = False
        return made

    def to_infer(self) -> InferRequest:
        """The request for another model; not part of the API."""
        request = self._request
        flags = SequenceFlags(
            request.sequence.correlation_id, bool(self._flags & SEQUENCE_START), bool(self._flags & SEQUENCE_END)
        )
        return InferRequest(
            model=request.model,
            version=request.version,
            request_id=request.request_id,
            inputs=tuple(tensor.to_infer() for tensor in self._inputs),
            outputs=request.outputs,
            parameters=request.parameters,
            timeout_us=request.timeout_us,
            sequence=flags,
        )

    def inputs(self) -> list[Tensor]:
        """The tensors; with the batch dimension, where the model has one."""
        return self._inputs

    def request_id(self) -> str:
        """The client's, "" when it gave none."""
        return self._request.request_id

    def correlation_id(self) -> int | str:
        """Of the sequence, 0 or "" for none."""
        return self._request.sequence.correlation_id

    def flags(self) -> int:
        """Of the sequence: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, added."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Change the flags, of a request for another model."""
        self._flags = flags

    def timeout(self) -> int:
        """Microseconds, 0 for none."""
        return self._request.timeout_us

    def parameters(self) -> str:
        """As a JSON object."""
        return json.dumps(dict(self._request.parameters))

    def trace(self) -> InferenceTrace:
        """The trace."""
        return self._trace

    def preferred_memory(self) -> PreferredMemory | None:
        """As given."""
        return self._preferred_memory

    def requested_output_names(self) -> list[str]:
        """Outputs that are wanted: all of the model's for a client that named none."""
        return list(self._output_names)

    def get_response_sender(self) -> InferenceResponseSender:
        """Sends this request's responses.

        Raises:
            TritonModelException: the request is one for another model.
        """
        if self._sender is None:
            raise TritonModelException("A request for another model has no response sender.")
        self.asked_for_sender = True
        return self._sender

    def is_cancelled(self) -> bool:
        """Whether nobody waits for responses any more."""
        return self._ticket is not None and self._ticket.cancelled

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request after `execute`.

        Raises:
            TritonModelException: it is anything but the end of it: rescheduling is not supported.
        """
        if flags != RELEASE_ALL:
            raise TritonModelException("Rescheduling a request is not supported by this server.")

    def exec(self, decoupled: bool = False) -> Any:
        """Ask another model and wait: its response, or with `decoupled` an iterator of its responses."""
        raise TritonModelException("BLS is only supported during the 'execute' function.")

    def async_exec(self, decoupled: bool = False) -> Any:
        """The same, to be awaited."""
        raise TritonModelException("BLS is only supported during the 'execute' function.")
