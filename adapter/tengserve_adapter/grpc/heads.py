"""ModelInferRequests whose heads were read before.

A client sends the same names, datatypes and shapes again and again, and reading them costs more than all the rest of a
small request. So what a head says is kept: a message without its id and its raw contents, as the bytes that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tengserve_adapter.tensors.raw import decode_raw
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferTensor,
    ParameterValue,
    RequestedOutput,
    TensorModel,
    TensorSpec,
)
from tengserve_backend.inference.datatypes import Array

MAX_HEAD_BYTES: Final = 2048
MAX_CONTENTS: Final = 256
"""Where a head ends at the latest, in bytes, and how many raw contents may follow it."""

_ID, _RAW = 3 << 3 | 2, 7 << 3 | 2
_OTHERS: Final = frozenset(number << 3 | 2 for number in (1, 2, 5, 6))
"""Tags of id and raw_input_contents, and of model_name, model_version, inputs and outputs. Every
field has a length and bytes."""


class Parts(NamedTuple):
    """A message taken apart.

    Attributes:
        head: all of it but the id and the raw contents: a message too.
        request_id: the id.
        raw: the raw contents, at least one.
    """

    head: bytes
    request_id: str
    raw: list[bytes]


def parts_of(data: bytes) -> Parts | None:
    """A message as every client writes it: fields in the order of their numbers, no parameters, raw contents last.

    None is any other message, and what is none. The head may still be wrong in itself.
    """
    end = len(data)
    offset = last = id_start = id_end = 0
    head_end = end
    request_id = ""
    raw: list[bytes] = []
    while offset < end - 1:
        tag = data[offset]
        start = offset + 2
        size = data[offset + 1]
        if size > 0x7F:
            size, start = _varint(data, offset + 1)
        stop = start + size
        if stop > end:
            return None
        if tag == _RAW:
            if not raw:
                head_end = offset
            elif len(raw) == MAX_CONTENTS:
                return None
            raw.append(data[start:stop])
        elif tag < last or stop > MAX_HEAD_BYTES:
            return None
        elif tag == _ID:
            # Of several the last counts, as in any message; the others stay in the head.
            id_start, id_end = offset, stop
            try:
                request_id = data[start:stop].decode()
            except UnicodeDecodeError:
                return None
        elif tag not in _OTHERS:
            return None
        last = tag
        offset = stop
    if offset != end or not raw:
        return None
    return Parts(data[:id_start] + data[id_end:head_end], request_id, raw)


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A length and the offset behind it; one that is too long for the data when it has no end."""
    size = 0
    for shift in range(0, 35, 7):
        if offset >= len(data):
            break
        byte = data[offset]
        offset += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, offset
    return len(data) + 1, offset


class Head:
    """What a head says, of a message that was right.

    Args:
        request: what the message was read into.
        outputs: of the model that it was for.

    Attributes:
        model_name, version: as the client wrote them.
    """

    __slots__ = ("_inputs", "_known_outputs", "_outputs", "model_name", "version")

    def __init__(self, request: InferRequest, outputs: tuple[TensorSpec, ...]) -> None:
        self.model_name = request.model
        self.version = request.version
        self._inputs = tuple(_Input(tensor) for tensor in request.inputs)
        self._outputs: tuple[RequestedOutput, ...] = request.outputs
        self._known_outputs = outputs

    def suits(self, model: TensorModel) -> bool:
        """Whether the model has the outputs that those of the head were compared with: it may be another by now."""
        return model.outputs is self._known_outputs

    def request(self, request_id: str, raw: Sequence[bytes]) -> InferRequest | None:
        """The request of a message with this head; None when it has too few raw contents, or too many.

        Raises:
            InvalidRequestError: the contents are not what the head says.
        """
        if len(raw) != len(self._inputs):
            return None
        inputs = tuple([known.tensor(data) for known, data in zip(self._inputs, raw, strict=True)])
        return InferRequest(self.model_name, self.version, request_id, inputs, self._outputs)


class _Input:
    """One input of a head."""

    __slots__ = ("_datatype", "_dtype", "_name", "_parameters", "_shape", "_size")

    def __init__(self, tensor: InferTensor) -> None:
        self._name = tensor.name
        self._datatype = tensor.datatype
        self._dtype = tensor.datatype.dtype
        self._shape = tensor.shape
        self._parameters: Mapping[str, ParameterValue] = tensor.parameters
        # What has no such size is read by `decode_raw`, which also says what is wrong.
        copied = tensor.datatype in (Datatype.BYTES, Datatype.BOOL)
        self._size = -1 if copied else tensor.data.nbytes

    def tensor(self, raw: bytes) -> InferTensor:
        if len(raw) == self._size:
            array: Array = np.ndarray(self._shape, self._dtype, raw)
        else:
            array = decode_raw(self._name, self._datatype, self._shape, raw)
        return InferTensor(self._name, self._datatype, array, self._parameters)
