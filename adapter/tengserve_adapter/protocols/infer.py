"""v2 infer over HTTP: a JSON head, then the binary tensors, both ways. Pure: bytes and dicts to requests and back.

In a request each input has its elements in `data` or behind the head, `parameters.binary_data_size` bytes of them in
the order of the inputs. In a response an output is binary when its request says so, or when nothing is said of it and
the request's `binary_data_output` is true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from tengserve_adapter.tensors.classification import classify
from tengserve_adapter.tensors.json_data import bytes_array, from_json, to_json
from tengserve_adapter.tensors.parameters import model_parameter, sort_out
from tengserve_adapter.tensors.raw import decode_raw, element_count, encode_raw
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.checks import given
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    ParameterValue,
    RequestedOutput,
    TensorModel,
    TensorSpec,
)

_INT64_MAX = 2**63 - 1
_SHARED_MEMORY = frozenset({"shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"})


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the outputs of one response are to be written.

    Attributes:
        binary: by name, what the request says of an output.
        binary_default: for outputs that it does not name.
    """

    binary: Mapping[str, bool] = field(default_factory=dict)
    binary_default: bool = False

    def is_binary(self, name: str) -> bool:
        """Whether the output comes as binary data."""
        return self.binary.get(name, self.binary_default)


@dataclass(frozen=True, slots=True)
class Written:
    """A response's body.

    Attributes:
        body: all of it.
        head_bytes: length of the JSON before the binary data; None when there is none.
    """

    body: bytes
    head_bytes: int | None


def parse_request(
    model: TensorModel, version: str, head: Mapping[str, object], tail: bytes
) -> tuple[InferRequest, Wishes]:
    """A request from its JSON head and the binary data behind it.

    Args:
        model: that is asked; its shapes are its own check.
        version: as asked for, "" for the newest.
        head: the JSON object.
        tail: what follows it.

    Raises:
        InvalidRequestError: it breaks the protocol.
    """
    parameters = sort_out(_object("parameters", head.get("parameters", {})))
    inputs, used = _inputs(_list("inputs", head.get("inputs")), tail)
    if used != len(tail):
        raise InvalidRequestError(
            f"the request has {len(tail)} bytes of binary data behind its JSON, but its inputs take {used}: "
            f"unexpected additional input data for model '{shown(model.name)}'",
            field="inputs",
        )
    outputs, binary = _outputs(head.get("outputs"), model, default=parameters.binary_data_output)
    request = InferRequest(
        model=model.name,
        version=version,
        request_id=_request_id(head.get("id", "")),
        inputs=inputs,
        outputs=outputs,
        parameters=parameters.parameters,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        sequence=parameters.sequence,
    )
    return request, Wishes(binary, parameters.binary_data_output)


def raw_request(model: TensorModel, version: str, body: bytes) -> tuple[InferRequest, Wishes]:
    """A raw binary request: the body is the only input's elements, and the outputs come as binary data.

    Raises:
        InvalidRequestError: the model's metadata leaves open what the bytes mean.
    """
    if len(model.inputs) != 1:
        raise InvalidRequestError(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(model.inputs)} inputs in '{shown(model.name)}' model"
        )
    spec = model.inputs[0]
    shape = [1, *spec.shape[1:]] if model.max_batch_size > 0 else list(spec.shape)
    if spec.datatype is Datatype.BYTES:
        if any(size != 1 for size in shape):
            raise InvalidRequestError(
                f"For BYTE datatype raw input '{shown(spec.name)}', the model must have input shape [1], got {shape}",
                field=spec.name,
            )
        data = bytes_array([body]).reshape([1] * len(shape))
    else:
        data = decode_raw(spec.name, spec.datatype, _deduced(spec, shape, len(body)), body)
    tensor = InferTensor(spec.name, spec.datatype, data)
    return InferRequest(model.name, version, "", (tensor,)), Wishes(binary_default=True)


def _deduced(spec: TensorSpec, shape: list[int], size: int) -> list[int]:
    open_dimensions = [index for index, length in enumerate(shape) if length < 0]
    if not open_dimensions:
        return shape
    if len(open_dimensions) > 1:
        raise InvalidRequestError(
            f"The shape of the raw input '{shown(spec.name)}' can not be deduced because there are more than one "
            f"variable-sized dimension",
            field=spec.name,
        )
    element = element_count(spec.name, [1 if length < 0 else length for length in shape])
    shape[open_dimensions[0]] = size // max(1, element * (spec.datatype.itemsize or 1))
    return shape


def _inputs(items: Sequence[object], tail: bytes) -> tuple[tuple[InferTensor, ...], int]:
    tensors: dict[str, InferTensor] = {}
    offset = 0
    for index, item in enumerate(items):
        entry = _object(f"inputs[{index}]", item)
        name = _string(f"inputs[{index}].name", entry.get("name"))
        if name in tensors:
            raise InvalidRequestError(f"input '{shown(name)}' already exists in request", field=name)
        tensor, size = _input(name, entry, tail, offset)
        tensors[name] = tensor
        offset += size
    return tuple(tensors.values()), offset


def _input(name: str, entry: Mapping[str, object], tail: bytes, offset: int) -> tuple[InferTensor, int]:
    datatype = _datatype(name, entry.get("datatype"))
    shape = _shape(name, datatype, entry.get("shape"))
    parameters = dict(_object("parameters of input", entry.get("parameters", {}), name))
    if not _SHARED_MEMORY.isdisjoint(parameters):
        raise InvalidRequestError(
            f"input '{shown(name)}' is in shared memory, which this server does not serve: send its data", field=name
        )
    size = parameters.pop("binary_data_size", None)
    rest = {key: model_parameter(key, value) for key, value in parameters.items()}
    if size is None:
        return InferTensor(name, datatype, from_json(name, datatype, shape, entry.get("data")), rest), 0
    if "data" in entry:
        raise InvalidRequestError(
            f"input '{shown(name)}' must have either 'data' or 'binary_data_size', got both", field=name
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidRequestError(
            f"'binary_data_size' of input '{shown(name)}' must be an unsigned integer, got {given(size)}", field=name
        )
    if size > len(tail) - offset:
        raise InvalidRequestError(
            f"unexpected end of data: input '{shown(name)}' has 'binary_data_size' {shown(size)}, "
            f"but only {len(tail) - offset} bytes follow",
            field=name,
        )
    data = decode_raw(name, datatype, shape, tail[offset : offset + size])
    return InferTensor(name, datatype, data, rest), size


def _outputs(
    items: object, model: TensorModel, *, default: bool
) -> tuple[tuple[RequestedOutput, ...], dict[str, bool]]:
    if items is None:
        return (), {}
    known = {spec.name for spec in model.outputs}
    outputs: dict[str, RequestedOutput] = {}
    binary: dict[str, bool] = {}
    for index, item in enumerate(_list("outputs", items)):
        entry = _object(f"outputs[{index}]", item)
        name = _string(f"outputs[{index}].name", entry.get("name"))
        if name in outputs:
            raise InvalidRequestError(f"output '{shown(name)}' already exists in request", field=name)
        if known and name not in known:
            raise InvalidRequestError(
                f"unexpected inference output '{shown(name)}' for model '{shown(model.name)}'", field=name
            )
        parameters = dict(_object("parameters of output", entry.get("parameters", {}), name))
        outputs[name], binary[name] = _output(name, parameters, default=default)
    return tuple(outputs.values()), binary


def _output(name: str, parameters: dict[str, object], *, default: bool) -> tuple[RequestedOutput, bool]:
    if not _SHARED_MEMORY.isdisjoint(parameters):
        raise InvalidRequestError(
            f"output '{shown(name)}' asks for shared memory, which this server does not serve", field=name
        )
    classes = parameters.pop("classification", 0)
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
        raise InvalidRequestError(
            f"'classification' of output '{shown(name)}' must be an unsigned integer, got {given(classes)}", field=name
        )
    binary = parameters.pop("binary_data", default)
    if not isinstance(binary, bool):
        raise InvalidRequestError(
            f"'binary_data' of output '{shown(name)}' must be boolean, got {given(binary)}", field=name
        )
    rest = {key: model_parameter(key, value) for key, value in parameters.items()}
    return RequestedOutput(name, classes, rest), binary


def select(request: InferRequest, response: InferResponse, model: TensorModel) -> tuple[InferTensor, ...]:
    """The outputs that a request asked for, in its order, as classes where it wants classes.

    Several of one name all come, as in Triton.

    Raises:
        InvalidRequestError: an output has no classes.
    """
    if not request.outputs:
        return response.outputs
    return tuple(
        [
            tensor if wish.classification == 0 else _classes(wish, tensor, model)
            for wish in request.outputs
            for tensor in response.outputs
            if tensor.name == wish.name
        ]
    )


def _classes(wish: RequestedOutput, tensor: InferTensor, model: TensorModel) -> InferTensor:
    spec = next((spec for spec in model.outputs if spec.name == wish.name), None)
    return classify(tensor, wish.classification, spec, batched=model.max_batch_size > 0)


def write_response(response: InferResponse, outputs: Sequence[InferTensor], wishes: Wishes) -> Written:
    """The body of a response.

    Raises:
        InvalidRequestError: an output has no JSON form, and was not asked for as binary data.
    """
    head: dict[str, object] = {"id": response.request_id} if response.request_id else {}
    head |= {"model_name": response.model, "model_version": response.version}
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    buffers: list[bytes] = []
    head["outputs"] = [_written(tensor, wishes.is_binary(tensor.name), buffers) for tensor in outputs]
    encoded = dumps(head, outputs)
    if not any(wishes.is_binary(tensor.name) for tensor in outputs):
        return Written(encoded, None)
    return Written(b"".join((encoded, *buffers)), len(encoded))


def _written(tensor: InferTensor, binary: bool, buffers: list[bytes]) -> dict[str, object]:
    parameters: dict[str, ParameterValue] = dict(tensor.parameters)
    entry: dict[str, object] = {
        "name": tensor.name,
        "datatype": tensor.datatype.value,
        "shape": list(tensor.shape),
    }
    if binary:
        buffer = encode_raw(tensor)
        buffers.append(buffer)
        parameters["binary_data_size"] = len(buffer)
    else:
        entry["data"] = to_json(tensor)
    if parameters:
        entry["parameters"] = parameters
    return entry


def dumps(data: object, outputs: Sequence[InferTensor]) -> bytes:
    """JSON. NaN and the infinities are written by these names, as Triton does: JSON itself cannot say them."""
    if all(_is_finite(tensor) for tensor in outputs):
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(data, default=_as_list, separators=(",", ":")).encode()


def _is_finite(tensor: InferTensor) -> bool:
    return tensor.data.dtype.kind != "f" or bool(np.isfinite(tensor.data).all())


def _as_list(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _request_id(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError("Unable to parse 'id': attempt to access JSON non-string as string", field="id")
    return value


def _datatype(name: str, value: object) -> Datatype:
    if isinstance(value, str) and value in Datatype.__members__:
        return Datatype[value]
    raise InvalidRequestError(
        f"'datatype' of input '{shown(name)}' must be one of {', '.join(Datatype.__members__)}, got {given(value)}",
        field=name,
    )


def _check_overflow(name: str, datatype: Datatype, shape: list[int]) -> None:
    """Sizes that no 64 bits hold, in Triton's words; what is merely too large for any tensor is element_count's."""
    if 0 in shape:
        return
    count = 1
    for size in shape:
        count *= size
        # Not once all are multiplied: a client may send a million of them, and the product would have as many words.
        if count > _INT64_MAX:
            raise InvalidRequestError(
                f"shape of input '{shown(name)}' causes total element count to exceed maximum size of {_INT64_MAX}",
                field=name,
            )
    if count * (datatype.itemsize or 1) > _INT64_MAX:
        raise InvalidRequestError(f"byte size overflow for input '{shown(name)}'", field=name)


def _shape(name: str, datatype: Datatype, value: object) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"'shape' of input '{shown(name)}' must be a list, got {given(value)}", field=name)
    for size in value:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidRequestError(
                "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer, "
                f"got {given(size)} for input '{shown(name)}'",
                field=name,
            )
    _check_overflow(name, datatype, value)
    element_count(name, value)
    return value


def _object(what: str, value: object, name: str | None = None) -> Mapping[str, object]:
    """The object; `name` is that of the tensor which it is said of."""
    if not isinstance(value, dict):
        what = what if name is None else f"{what} '{shown(name)}'"
        raise InvalidRequestError(f"{what} must be an object, got {given(value)}", field=what)
    return value


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"Unable to parse '{what}': must be a list, got {given(value)}", field=what)
    return value


def _string(what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            f"Unable to parse '{what}': must be a non-empty string, got {given(value)}", field=what
        )
    return value
