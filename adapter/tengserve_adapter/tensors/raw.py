"""Tensors as raw bytes: HTTP's binary data and gRPC's raw contents.

Elements stand one after the other in row-major order, little endian. An element of BYTES is its length as four bytes,
then the bytes themselves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.inference.datatypes import Array

_LENGTH = struct.Struct("<I")
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48
"""More than any request can carry, and far from what numpy refuses; an empty tensor's other dimensions count too."""


def decode_raw(name: str, datatype: Datatype, shape: Sequence[int], data: bytes | memoryview) -> Array:
    """An input's array from its bytes; read-only where it shares their memory.

    Raises:
        InvalidRequestError: no tensor has such a shape, or the bytes are not those of so many elements.
    """
    count = element_count(name, shape)
    if datatype is Datatype.BYTES:
        return _decode_bytes(name, count, data).reshape(shape)
    expected = count * datatype.dtype.itemsize
    if len(data) != expected:
        raise InvalidRequestError(
            f"input '{shown(name)}' must have {expected} bytes for shape {shown(list(shape))} of {datatype.value},"
            f" got {len(data)}",
            field=shown(name),
        )
    if datatype is Datatype.BOOL:  # Whatever is not 0 is true; numpy's own bool has 0 and 1 only.
        return np.frombuffer(data, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(data, datatype.dtype).reshape(shape)


def encode_raw(tensor: InferTensor) -> bytes:
    """The bytes of a tensor; no copy where they are what its array lies in."""
    if tensor.datatype is not Datatype.BYTES:
        data = tensor.data
        memory: object = data.base
        if isinstance(memory, bytes) and len(memory) == data.nbytes and data.flags.c_contiguous:
            return memory
        return data.tobytes()
    parts: list[bytes] = []
    for element in tensor.data.ravel().tolist():
        content = element if isinstance(element, bytes) else str(element).encode()
        parts += (_LENGTH.pack(len(content)), content)
    return b"".join(parts)


def element_count(name: str, shape: Sequence[int]) -> int:
    """How many elements an input of this shape has.

    Raises:
        InvalidRequestError: no tensor has such a shape.
    """
    if len(shape) <= _MAX_DIMENSIONS:
        count = math.prod(shape)
        # The usual case, without a loop in Python. Below 1 a size may be negative, or hide one that is too large.
        if 0 < count <= _MAX_ELEMENTS and min(shape, default=1) > 0:
            return count
        if all(size >= 0 for size in shape) and math.prod(size or 1 for size in shape) <= _MAX_ELEMENTS:
            return count
    raise InvalidRequestError(
        f"shape of input '{shown(name)}' must have at most {_MAX_DIMENSIONS} dimensions, none negative, and at most"
        f" {_MAX_ELEMENTS} elements, got {shown(list(shape))}",
        field=shown(name),
    )


def _decode_bytes(name: str, count: int, data: bytes | memoryview) -> Array:
    # Each element takes four bytes at least: a shape may not make us allocate more than was sent.
    if count * _LENGTH.size > len(data):
        raise _wrong_bytes(name, count)
    elements = np.empty(count, np.object_)
    view = memoryview(data)
    offset = 0
    for index in range(count):
        start = offset + _LENGTH.size
        if start > len(view):
            raise _wrong_bytes(name, count)
        offset = start + _LENGTH.unpack_from(view, offset)[0]
        if offset > len(view):
            raise _wrong_bytes(name, count)
        elements[index] = bytes(view[start:offset])
    if offset != len(view):
        raise _wrong_bytes(name, count)
    return elements


def _wrong_bytes(name: str, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"input '{shown(name)}' must have {count} elements of BYTES, each with its length as 4 bytes before it, and"
        " nothing after them",
        field=shown(name),
    )
