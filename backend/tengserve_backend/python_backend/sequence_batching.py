"""Sequence batching as config.pbtxt sets it, and the control tensors with which a model learns of its sequences."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tengserve_backend.errors import ConfigurationError, InvalidRequestError
from tengserve_backend.inference import Datatype, InferRequest, InferTensor, SequenceFlags
from tengserve_backend.python_backend.batching import Batching, preferred_sizes

DEFAULT_IDLE_US = 1_000_000
"""Triton's, where config.pbtxt says nothing."""


class Strategy(enum.Enum):
    """How requests of several sequences make one batch."""

    DIRECT = "direct"
    OLDEST = "oldest"


class ControlKind(enum.Enum):
    """What a control tensor tells."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRELATION_ID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True)
class Control:
    """One control tensor.

    Attributes:
        name, datatype: of the tensor.
        kind: what it tells.
        false, true: its two values; of a correlation ID, which has others, 0.
    """

    name: str
    kind: ControlKind
    datatype: Datatype
    false: float = 0
    true: float = 0


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Triton's sequence batcher.

    Attributes:
        strategy: direct keeps each sequence in its own row of the batch; oldest batches as requests come.
        slots: sequences that one instance has open at the same time; others wait.
        idle_us: microseconds after which a sequence that sends nothing is ended.
        batching: of the strategy oldest.
        max_delay_ns, min_utilization: of the strategy direct: how long a batch waits for requests of other sequences,
            unless this part of the slots has one.
        controls: tensors that are added to each request.
        batched: whether tensors have a batch dimension.
    """

    strategy: Strategy
    slots: int
    idle_us: int
    batching: Batching
    max_delay_ns: int
    min_utilization: float
    controls: tuple[Control, ...]
    batched: bool

    def controlled(self, request: InferRequest) -> InferRequest:
        """The request with its control tensors.

        Raises:
            InvalidRequestError: its correlation ID does not fit the tensor that has it.
        """
        if not self.controls:
            return request
        tensors = tuple(self._tensor(control, request.sequence, ready=True) for control in self.controls)
        return replace(request, inputs=request.inputs + tensors)

    def filler(self, request: InferRequest) -> InferRequest:
        """A request of the same form that says that it is none, for the row of a sequence that has nothing to say."""
        names = {control.name for control in self.controls}
        inputs = tuple(replace(tensor, data=_nothing(tensor)) for tensor in request.inputs if tensor.name not in names)
        nobody = SequenceFlags()
        tensors = tuple(self._tensor(control, nobody, ready=False) for control in self.controls)
        return InferRequest(request.model, request.version, "", inputs + tensors, request.outputs)

    def _tensor(self, control: Control, sequence: SequenceFlags, *, ready: bool) -> InferTensor:
        match control.kind:
            case ControlKind.CORRELATION_ID:
                data = _correlation_id(control, sequence.correlation_id)
            case ControlKind.START:
                data = _flag(control, sequence.start)
            case ControlKind.END:
                data = _flag(control, sequence.end)
            case ControlKind.READY:
                data = _flag(control, ready)
        return InferTensor(control.name, control.datatype, data.reshape((1, 1) if self.batched else (1,)))


def read_sequence_batching(given: Mapping[str, Any], max_batch_size: int) -> SequenceBatching:
    """The typed form of `sequence_batching`, which repository.sequence_batching has checked.

    Raises:
        ConfigurationError: a value that the schema allows and a model cannot have.
    """
    strategy = Strategy.OLDEST if "oldest" in given else Strategy.DIRECT
    chosen = given.get(strategy.value, {})
    slots = max(1, max_batch_size)
    batching = Batching()
    if strategy is Strategy.OLDEST:
        slots = chosen["max_candidate_sequences"] or slots
        batching = Batching(
            preferred_sizes=preferred_sizes("sequence_batching: oldest", chosen, max_batch_size),
            max_delay_ns=chosen["max_queue_delay_microseconds"] * 1000,
            preserve_ordering=chosen["preserve_ordering"],
        )
    return SequenceBatching(
        strategy=strategy,
        slots=slots,
        idle_us=given["max_sequence_idle_microseconds"] or DEFAULT_IDLE_US,
        batching=batching,
        max_delay_ns=chosen.get("max_queue_delay_microseconds", 0) * 1000,
        min_utilization=chosen.get("minimum_slot_utilization", 0.0),
        controls=tuple(_control(tensor["name"], tensor["control"][0]) for tensor in given["control_input"]),
        batched=max_batch_size > 0,
    )


def _control(name: str, given: Mapping[str, Any]) -> Control:
    kind = ControlKind(given["kind"])
    if kind is ControlKind.CORRELATION_ID:
        return Control(name, kind, next(one for one in Datatype if one.config_name == given["data_type"]))
    for field, datatype in (
        ("int32_false_true", Datatype.INT32),
        ("fp32_false_true", Datatype.FP32),
        ("bool_false_true", Datatype.BOOL),
    ):
        if given[field]:
            false, true = given[field]
            return Control(name, kind, datatype, false, true)
    raise ConfigurationError(f"sequence_batching: the control of {name} has no values")  # It has been checked.


def _flag(control: Control, value: bool) -> np.ndarray[Any, np.dtype[Any]]:
    return np.array(control.true if value else control.false, control.datatype.dtype)


def _correlation_id(control: Control, given: int | str) -> np.ndarray[Any, np.dtype[Any]]:
    text = control.datatype is Datatype.BYTES
    if not given:
        given = "" if text else 0
    if isinstance(given, str) is not text:
        raise InvalidRequestError(
            f"the correlation ID must be a {'string' if text else 'number'} for this model, got {str(given)[:64]!r}",
            field="sequence_id",
        )
    data = np.empty(1, control.datatype.dtype)
    try:
        data[0] = given.encode() if isinstance(given, str) else given
    except OverflowError:
        raise InvalidRequestError(
            f"the correlation ID must fit {control.datatype.value} for this model, got {given}", field="sequence_id"
        ) from None
    return data


def _nothing(tensor: InferTensor) -> np.ndarray[Any, np.dtype[Any]]:
    if tensor.datatype is Datatype.BYTES:
        return np.full(tensor.shape, b"", np.object_)
    return np.zeros(tensor.shape, tensor.data.dtype)
