"""Elements as JSON: a list in any nesting, read row-major; written flat.

FP16 and BF16 have no JSON form in the v2 protocol: they go as binary data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tengserve_adapter.tensors.raw import element_count
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.checks import given
from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.inference.datatypes import Array

MAX_NESTING: Final = 100
"""Lists within each other in `data`, as in Triton."""

BINARY_ONLY: Final = frozenset({Datatype.FP16, Datatype.BF16})
_FLOATS: Final = frozenset({Datatype.FP32, Datatype.FP64})


def from_json(name: str, datatype: Datatype, shape: Sequence[int], data: object) -> Array:
    """The array of an input that came as JSON.

    Raises:
        InvalidRequestError: it is no list, an element is not of the datatype, or their number does not fit the shape.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequestError(
            f"sending {datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for input '{shown(name)}'",
            field=name,
        )
    if not isinstance(data, list):
        raise _wrong(name, "a list of elements", data)
    flat = flatten(name, data)
    count = element_count(name, shape)
    if len(flat) != count:
        raise InvalidRequestError(
            f"the shape {list(shape)} of input '{shown(name)}' has {count} elements, "
            f"which does not match the {len(flat)} elements of its 'data'",
            field=name,
        )
    return elements(name, datatype, flat).reshape(shape)


def flatten(name: str, data: list[object]) -> list[object]:
    """The elements of nested lists, in order.

    Raises:
        InvalidRequestError: the nesting is too deep.
    """
    if not _has_list(data):
        return data
    # Each element is seen once, however deep its neighbours are.
    flat: list[object] = []
    within = [iter(data)]
    while within:
        for item in within[-1]:
            if not isinstance(item, list):
                flat.append(item)
                continue
            if len(within) == MAX_NESTING:
                raise InvalidRequestError(
                    f"JSON nesting depth exceeds maximum allowed limit ({MAX_NESTING}) in 'data' of input "
                    f"'{shown(name)}'",
                    field=name,
                )
            if _has_list(item):
                within.append(iter(item))
                break
            flat += item
        else:
            within.pop()
    return flat


def _has_list(items: list[object]) -> bool:
    return list in set(map(type, items))


def elements(name: str, datatype: Datatype, flat: list[object]) -> Array:
    """Checked elements as an array of one dimension; for what JSON can say, so neither FP16 nor BF16.

    Raises:
        InvalidRequestError: an element is not of the datatype, or outside its range.
    """
    if datatype is Datatype.BYTES:
        return bytes_array([_text(name, item) for item in flat])
    if datatype is Datatype.BOOL:
        wrong = next((item for item in flat if type(item) is not bool and not _is_bit(item)), None)
        if wrong is not None or None in flat:
            raise _wrong(name, "boolean", wrong)
        return np.array(flat, np.bool_)
    if datatype in _FLOATS:
        return _floats(name, datatype, flat)
    return _integers(name, datatype, flat)


def _is_bit(item: object) -> bool:
    return type(item) is int and item in (0, 1)


def _text(name: str, item: object) -> bytes:
    if not isinstance(item, str):
        raise _wrong(name, "string", item)
    return item.encode("utf-8")


def _integers(name: str, datatype: Datatype, flat: list[object]) -> Array:
    numbers = [item for item in flat if type(item) is int]
    if len(numbers) != len(flat):
        raise _wrong(name, "integer", next(item for item in flat if type(item) is not int))
    limits = np.iinfo(datatype.dtype.name)
    if numbers and (min(numbers) < limits.min or max(numbers) > limits.max):
        offender = next(item for item in numbers if not limits.min <= item <= limits.max)
        raise _wrong(name, f"{datatype.value}, so in [{limits.min}, {limits.max}]", offender)
    return np.array(numbers, datatype.dtype)


def _floats(name: str, datatype: Datatype, flat: list[object]) -> Array:
    if not {type(item) for item in flat} <= {int, float}:
        raise _wrong(name, "number", next(item for item in flat if type(item) not in (int, float)))
    try:
        doubles = np.array(flat, np.float64)
    except OverflowError:
        raise _wrong(name, "inside the range of FP64", "a larger integer") from None
    if datatype is Datatype.FP64:
        return doubles
    with np.errstate(over="ignore"):
        singles = doubles.astype(np.float32)
    # Infinity itself is FP32, and so is what rounds to the largest number, which is how that one is written.
    too_large = np.isinf(singles) & np.isfinite(doubles)
    if too_large.any():
        raise _wrong(name, "inside the range of FP32", float(doubles[too_large][0]))
    return singles


def _wrong(name: str, rule: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"'data' of input '{shown(name)}' must be {rule}, got {given(value)}", field=name)


def to_json(tensor: InferTensor) -> Array | list[str]:
    """The elements of an output, flat, as orjson writes them: texts, or a contiguous array of numbers or booleans.

    Raises:
        InvalidRequestError: only binary data can say it.
    """
    if tensor.datatype in BINARY_ONLY:
        raise InvalidRequestError(
            f"sending {tensor.datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for output '{shown(tensor.name)}'",
            field=tensor.name,
        )
    flat = tensor.data.reshape(-1)
    if tensor.datatype is not Datatype.BYTES:
        return np.ascontiguousarray(flat)
    try:
        return [item.decode("utf-8") if isinstance(item, bytes) else str(item) for item in flat]
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"output '{shown(tensor.name)}' is not UTF-8 text, which JSON needs. Please use the binary data format",
            field=tensor.name,
        ) from None


def bytes_array(items: Sequence[bytes]) -> Array:
    """A one-dimensional BYTES array."""
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array
