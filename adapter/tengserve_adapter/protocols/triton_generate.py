"""Triton's generate extension for models of tensors: flat JSON to tensors and parameters, and back.

What a key means is in the model's metadata: the name of an input is a tensor, everything else a parameter. Texts are
Triton's, which its clients compare.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tengserve_adapter.protocols.infer import dumps
from tengserve_adapter.tensors.json_data import BINARY_ONLY, elements, to_json
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    ParameterValue,
    TensorModel,
    TensorSpec,
)

NESTED: Final = "parameters"
NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)

MAX_KEYS: Final = 4096
"""Keys of a body; a bound, and no rule of the protocol."""


class Pairs(list[tuple[str, object]]):
    """A JSON object as its keys and values in order, equal keys kept: the object_pairs_hook for a body."""


def parse(body: object, model: TensorModel, version: str) -> InferRequest:
    """The request of a body whose objects were parsed as Pairs.

    Args:
        body: the JSON.
        model: that is asked; whether its inputs are all there is its own check.
        version: as asked for, "" for the newest.

    Raises:
        InvalidRequestError: it breaks the mapping.
    """
    if not isinstance(body, Pairs):
        raise InvalidRequestError("failed to parse the request JSON buffer: must be an object")
    mapping = _Mapping(model)
    for key, value in body:
        if key == NESTED:
            _nested(mapping, value)
        else:
            mapping.take(key, value)
    return InferRequest(
        model=model.name,
        version=version,
        request_id=mapping.request_id,
        inputs=tuple(mapping.inputs.values()),
        parameters=mapping.parameters,
    )


def _nested(mapping: _Mapping, value: object) -> None:
    if NESTED in mapping.specs:
        raise InvalidRequestError(
            f"keyword: '{NESTED}' for nested schema also given as input tensor name", field=NESTED
        )
    if not isinstance(value, Pairs):
        raise InvalidRequestError(f"Expected JSON object for keyword: '{NESTED}'", field=NESTED)
    for key, member in value:
        try:
            mapping.take(key, member)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Converting keyword: '{NESTED}': {error.message}", field=error.field) from None


class _Mapping:
    """What the keys so far have made."""

    def __init__(self, model: TensorModel) -> None:
        self.specs: Final = {spec.name: spec for spec in model.inputs}
        self.request_id = ""
        self.inputs: dict[str, InferTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}
        self._keys = 0

    def take(self, key: str, value: object) -> None:
        self._keys += 1
        if self._keys > MAX_KEYS:
            raise InvalidRequestError(f"a request has at most {MAX_KEYS} keys")
        spec = self.specs.get(key)
        if spec is not None:
            if key in self.inputs:
                raise InvalidRequestError(f"input '{shown(key)}' already exists in request", field=key)
            self.inputs[key] = _tensor(spec, value)
        elif key == "id":
            if not isinstance(value, str):
                raise InvalidRequestError(
                    "Unable to parse 'id': attempt to access JSON non-string as string", field="id"
                )
            self.request_id = value
        else:
            self.parameters[key] = _parameter(key, value)


def _parameter(key: str, value: object) -> ParameterValue:
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidRequestError(
        f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'.", field=key
    )


def _tensor(spec: TensorSpec, value: object) -> InferTensor:
    if spec.datatype in BINARY_ONLY:
        raise InvalidRequestError(
            f"sending {spec.datatype.value} data via JSON is not supported: input '{shown(spec.name)}'", field=spec.name
        )
    flat = value if isinstance(value, list) and not isinstance(value, Pairs) else [value]
    kinds, words = _expected(spec.datatype)
    if not {type(item) for item in flat} <= kinds:
        raise InvalidRequestError(
            f"Unable to parse '{shown(spec.name)}': attempt to access JSON non-{words[0]} as {words[1]}",
            field=spec.name,
        )
    data = elements(spec.name, spec.datatype, flat)
    return InferTensor(spec.name, spec.datatype, data.reshape(_shape(spec, len(flat))))


def _expected(datatype: Datatype) -> tuple[set[type], tuple[str, str]]:
    match datatype:
        case Datatype.BYTES:
            return {str}, ("string", "string")
        case Datatype.BOOL:
            return {bool}, ("boolean", "boolean")
        case Datatype.FP32 | Datatype.FP64:
            return {int, float}, ("number", "double")
        case Datatype.UINT8 | Datatype.UINT16 | Datatype.UINT32 | Datatype.UINT64:
            return {int}, ("unsigned-integer", "unsigned-integer")
        case _:
            return {int}, ("signed-integer", "signed-integer")


def _shape(spec: TensorSpec, count: int) -> list[int]:
    """The metadata's shape for so many elements: its last open dimension takes them, its other ones are 1."""
    fixed = math.prod(size for size in spec.shape if size >= 0)
    open_dimensions = [index for index, size in enumerate(spec.shape) if size < 0]
    fits = count % fixed == 0 if open_dimensions and fixed else count == fixed
    if not fits:
        raise InvalidRequestError(
            f"The schema can not convert input '{shown(spec.name)}' to tensor with proper shape", field=spec.name
        )
    shape = [1 if size < 0 else size for size in spec.shape]
    if open_dimensions:
        shape[open_dimensions[-1]] = count // fixed if fixed else 0
    return shape


def is_flag_only(model: TensorModel, response: InferResponse) -> bool:
    """Whether a response says nothing but that no other follows, as only a decoupled model's can."""
    return model.decoupled and response.final and not response.outputs and not response.parameters


def write(response: InferResponse) -> bytes:
    """The JSON of one response, keys in alphabetical order; a tensor of one element is that element.

    Raises:
        InvalidRequestError: an output has no JSON form.
    """
    data: dict[str, object] = {"model_name": response.model, "model_version": response.version}
    if response.request_id:
        data["id"] = response.request_id
    data |= response.parameters
    for tensor in response.outputs:
        data[tensor.name] = _value(tensor)
    return dumps(dict(sorted(data.items())), response.outputs)


def _value(tensor: InferTensor) -> object:
    flat = to_json(tensor)
    if len(flat) != 1:
        return flat
    only = flat[0]
    return only.item() if isinstance(only, np.generic) else only
