"""Triton's classification extension: instead of an output, its largest values with their classes."""

from __future__ import annotations

import math

from tengserve_adapter.tensors.json_data import bytes_array
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.inference import Datatype, InferTensor, TensorSpec
from tengserve_backend.inference.datatypes import Array

MAX_CLASSIFIED_ELEMENTS = 1_000_000
"""Triton's bound: the classes of a larger output would take seconds to sort."""


def classify(tensor: InferTensor, top: int, spec: TensorSpec | None, *, batched: bool) -> InferTensor:
    """BYTES elements `value:index`, or `value:index:label` for a class with a label, the largest value first.

    Args:
        tensor: numbers.
        top: how many classes, at most as many as there are.
        spec: of the output, for its labels.
        batched: classify each entry of the first dimension by itself.

    Raises:
        InvalidRequestError: the output has no numbers, or too many.
    """
    if tensor.datatype in (Datatype.BYTES, Datatype.BF16, Datatype.BOOL):
        raise InvalidRequestError(
            f"class result not available for output due to unsupported type '{tensor.datatype.value}': "
            f"'{shown(tensor.name)}'",
            field=tensor.name,
        )
    if tensor.data.size > MAX_CLASSIFIED_ELEMENTS:
        raise InvalidRequestError(
            f"classification output tensor too large: '{shown(tensor.name)}' has {tensor.data.size} elements, "
            f"more than {MAX_CLASSIFIED_ELEMENTS}",
            field=tensor.name,
        )
    batched = batched and tensor.data.ndim > 0
    batch, classes = (tensor.shape[0], math.prod(tensor.shape[1:])) if batched else (1, tensor.data.size)
    rows = tensor.data.reshape(batch, classes)
    labels = spec.labels if spec is not None else ()
    top = min(top, classes)
    texts = [_text(row, index, labels) for row in rows for index in _descending(row)[:top]]
    shape = (batch, top) if batched else (top,)
    return InferTensor(tensor.name, Datatype.BYTES, bytes_array(texts).reshape(shape), tensor.parameters)


def _descending(row: Array) -> list[int]:
    """Indexes of the row's values, the largest first; the first of equal ones first."""
    values = row.tolist()
    # A NaN is smaller than anything, so that it is no class before another one.
    return sorted(
        range(len(values)),
        key=lambda index: -math.inf if values[index] != values[index] else values[index],
        reverse=True,
    )


def _text(row: Array, index: int, labels: tuple[str, ...]) -> bytes:
    value = row[index].item()
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
