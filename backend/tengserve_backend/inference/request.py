"""The one typed infer request that HTTP and gRPC are parsed into, and its responses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tengserve_backend.inference.datatypes import Array, Datatype

ParameterValue = bool | int | float | str
"""A request, response or output parameter. bool is checked before int: True is no 1 here."""


@dataclass(frozen=True, slots=True, eq=False)
class InferTensor:
    """One tensor.

    Attributes:
        name: of the model's input or output.
        datatype: its elements.
        data: shape and elements, in row-major order; see Datatype.dtype.
        parameters: that came with it, or go with it.
    """

    name: str
    datatype: Datatype
    data: Array
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the data."""
        return self.data.shape

    @property
    def size_bytes(self) -> int:
        """What its elements take in memory: of BYTES the texts themselves, too."""
        if self.datatype is not Datatype.BYTES:
            return self.data.nbytes
        return self.data.nbytes + sum(map(len, self.data.reshape(-1).tolist()))


def larger_than(tensors: Sequence[InferTensor], limit_bytes: int) -> bool:
    """Whether tensors together take more memory than this; quick, however many elements they have."""
    size, texts = 0, False
    for tensor in tensors:
        size += tensor.data.nbytes
        texts = texts or tensor.datatype is Datatype.BYTES
    # Long texts are only counted where there are few of them.
    return size > limit_bytes or (texts and sum(tensor.size_bytes for tensor in tensors) > limit_bytes)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that the client asks for.

    Attributes:
        name: of the model's output.
        classification: answer with the top this many classes instead; 0 does not.
        parameters: further ones that came with it.
    """

    name: str
    classification: int = 0
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceFlags:
    """Where a request stands in its sequence (Triton's sequence extension).

    Attributes:
        correlation_id: number or text; 0 and "" are no sequence.
        start, end: first and last request of the sequence.
    """

    correlation_id: int | str = 0
    start: bool = False
    end: bool = False


class Cancellation:
    """Whoever made a request asks for its end, and reads on: the model may have a last word, and says when it is done.

    Whoever reads no more closes the iterator of responses instead. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._listener: Callable[[], None] | None = None

    def ask(self) -> None:
        """Ask for the end; harmless when asked again."""
        with self._lock:
            listener = None if self._asked else self._listener
            self._asked = True
        if listener is not None:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it when the end is asked for, from any thread; at once if it was. The last one is told."""
        with self._lock:
            self._listener = listener
            asked = self._asked
        if asked:
            listener()


@dataclass(frozen=True, slots=True, eq=False)
class InferRequest:
    """One infer request, checked against the protocol and not yet against the model.

    Attributes:
        model, version: as asked for; version "" is the newest.
        request_id: the client's, "" when it gave none.
        inputs: in the client's order.
        outputs: asked for; none asks for all.
        parameters: what the protocol does not take for itself.
        priority: 0 is the model's default; 1 is the highest.
        timeout_us: microseconds that the request may wait; 0 has no limit of its own.
        sequence: its flags.
        cancellation: how its maker asks for its end, if it may.
    """

    model: str
    version: str
    request_id: str
    inputs: tuple[InferTensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence: SequenceFlags = SequenceFlags()
    cancellation: Cancellation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class InferResponse:
    """One response; a decoupled model sends any number of them for a request.

    Attributes:
        model, version: that answered.
        request_id: of the request.
        outputs: may be empty for a final response that only says that it is the last.
        parameters: of the response.
        final: no response follows.
    """

    model: str
    version: str
    request_id: str
    outputs: tuple[InferTensor, ...]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    final: bool = True
