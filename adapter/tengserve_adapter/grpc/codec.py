"""ModelInferRequest to InferRequest, and InferResponse to ModelInferResponse: pure, one message at a time.

Answers carry raw contents only, whatever form the request had: clients decode nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tengserve_adapter.grpc.schema import Message, schema
from tengserve_adapter.protocols.infer import select
from tengserve_adapter.tensors.parameters import model_parameter, sort_out
from tengserve_adapter.tensors.raw import decode_raw, element_count, encode_raw
from tengserve_backend.errors import GenerationFailedError, InvalidRequestError, UnsupportedError, shown
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    ParameterValue,
    RequestedOutput,
    TensorModel,
)
from tengserve_backend.inference.datatypes import Array

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"

_SHARED_MEMORY: Final = "shared_memory_region"
_INT64_MAX: Final = (1 << 63) - 1
_ID_TAG: Final = bytes([3 << 3 | 2])
_RAW_CONTENT_TAG: Final = bytes([6 << 3 | 2])
"""Fields id and raw_output_contents of ModelInferResponse, each a length and bytes."""
_MAX_MESSAGE_BYTES: Final = (1 << 31) - 1
"""Of protobuf."""

_DATATYPES: Final = dict(Datatype.__members__)

_CONTENTS: Final[Mapping[Datatype, str]] = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
"""Where the protocol puts typed elements; FP16 and BF16 have no such place."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what it says of how it is to be answered.

    Attributes:
        request: for the model.
        empty_final: a stream is to end with an empty response when the model says separately that it has ended.
    """

    request: InferRequest
    empty_final: bool


def decode_request(model: TensorModel, message: Message) -> Asked:
    """A ModelInferRequest for this model, whose shapes are its own check.

    Raises:
        InvalidRequestError: it breaks the protocol.
        UnsupportedError: it refers to shared memory.
    """
    parameters = _parameters(message.parameters)
    empty_final = parameters.pop(EMPTY_FINAL, False)
    if not isinstance(empty_final, bool):
        raise InvalidRequestError(f"parameter '{EMPTY_FINAL}' must be a bool_param", field=EMPTY_FINAL)
    sorted_out = sort_out(parameters)
    request = InferRequest(
        model=message.model_name,
        version=message.model_version,
        request_id=message.id,
        inputs=_inputs(message),
        outputs=_outputs(model, message),
        parameters=sorted_out.parameters,
        priority=sorted_out.priority,
        timeout_us=sorted_out.timeout_us,
        sequence=sorted_out.sequence,
    )
    return Asked(request, empty_final)


def encode_response(model: TensorModel, request: InferRequest, response: InferResponse) -> Message:
    """The ModelInferResponse with the outputs that the request asked for."""
    message, raw = _response(response, select(request, response, model))
    message.raw_output_contents.extend(raw)
    return message


def serialize_response(model: TensorModel, request: InferRequest, response: InferResponse) -> bytes:
    """The bytes of the message that `encode_response` makes.

    The raw contents go behind the rest as they are, which is a message too: within one they would be copied twice.

    Raises:
        GenerationFailedError: a message cannot be so long.
    """
    tensors = select(request, response, model)
    if response.parameters or any(tensor.parameters for tensor in tensors):
        message, raw = _response(response, tensors)
        parts = [message.SerializeToString()]
    else:
        # The usual case: a head that says nothing new.
        described = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
        parts = [_head(response.model, response.version, described)]
        if response.request_id:
            request_id = response.request_id.encode()
            parts += (_ID_TAG, _varint(len(request_id)), request_id)
        raw = [encode_raw(tensor) for tensor in tensors]
    for content in raw:
        parts += (_RAW_CONTENT_TAG, _varint(len(content)), content)
    if sum(map(len, parts)) > _MAX_MESSAGE_BYTES:
        raise GenerationFailedError(
            f"The answer of model '{shown(response.model)}' takes more than {_MAX_MESSAGE_BYTES} bytes, the most that a"
            " message can have."
        )
    return b"".join(parts)


@functools.lru_cache(maxsize=256)
def _head(model: str, version: str, outputs: tuple[tuple[str, Datatype, tuple[int, ...]], ...]) -> bytes:
    """A ModelInferResponse without parameters, id and raw contents; outputs by name, datatype and shape."""
    message = schema().messages["ModelInferResponse"](model_name=model, model_version=version)
    for name, datatype, shape in outputs:
        message.outputs.add(name=name, datatype=datatype.value, shape=shape)
    head: bytes = message.SerializeToString()
    return head


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _response(response: InferResponse, tensors: Sequence[InferTensor]) -> tuple[Message, list[bytes]]:
    """The message without its raw contents, and these."""
    message = schema().messages["ModelInferResponse"](
        model_name=response.model, model_version=response.version, id=response.request_id
    )
    if response.parameters:
        _fill(message.parameters, response.parameters)
    raw: list[bytes] = []
    for tensor in tensors:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.parameters:
            _fill(output.parameters, tensor.parameters)
        raw.append(encode_raw(tensor))
    return message, raw


def _inputs(message: Message) -> tuple[InferTensor, ...]:
    raw = message.raw_input_contents
    tensors: dict[str, InferTensor] = {}
    for index, entry in enumerate(message.inputs):
        name = entry.name
        if name in tensors:
            raise InvalidRequestError(f"input '{shown(name)}' already exists in request", field=shown(name))
        parameters = _parameters(entry.parameters)
        if _SHARED_MEMORY in parameters:
            raise UnsupportedError(f"input '{shown(name)}' is in shared memory, which this server does not serve")
        datatype = _DATATYPES.get(entry.datatype)
        if datatype is None:
            raise InvalidRequestError(
                f"datatype of input '{shown(name)}' must be one of {', '.join(Datatype.__members__)},"
                f" got '{shown(entry.datatype)}'",
                field=shown(name),
            )
        if not raw:
            data = _typed(name, datatype, entry.shape, entry.contents)
        elif entry.HasField("contents") and entry.contents.ListFields():
            raise InvalidRequestError(
                f"contents field must not be specified when using raw_input_contents for '{shown(name)}' for model"
                f" '{shown(message.model_name)}'",
                field=shown(name),
            )
        elif index < len(raw):
            data = decode_raw(name, datatype, tuple(entry.shape), raw[index])
        else:
            raise _wrong_raw_count(message)
        rest = {key: model_parameter(key, value) for key, value in parameters.items()}
        tensors[name] = InferTensor(name, datatype, data, rest)
    if raw and len(raw) != len(tensors):
        raise _wrong_raw_count(message)
    return tuple(tensors.values())


def _wrong_raw_count(message: Message) -> InvalidRequestError:
    return InvalidRequestError(
        f"raw_input_contents must have one entry for each of the {len(message.inputs)} inputs,"
        f" got {len(message.raw_input_contents)}",
        field="raw_input_contents",
    )


def _typed(name: str, datatype: Datatype, shape: Message, contents: Message) -> Array:
    """The elements of a typed input."""
    count = element_count(name, shape)
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequestError(
            f"input '{shown(name)}' of {datatype.value} must come in raw_input_contents", field=shown(name)
        )
    for other, values in contents.ListFields():
        if other.name != field:
            raise InvalidRequestError(
                f"input '{shown(name)}' of {datatype.value} must come in {field}, got {len(values)} elements in"
                f" {other.name}",
                field=shown(name),
            )
    values = getattr(contents, field)
    if len(values) != count:
        raise InvalidRequestError(
            f"input '{shown(name)}' must have {count} elements in {field} for its shape, got {len(values)}",
            field=shown(name),
        )
    if datatype is Datatype.BYTES:
        data = np.empty(count, np.object_)
        data[:] = list(values)
        return data.reshape(tuple(shape))
    wide: Array = np.fromiter(values, _WIDE.get(field, datatype.dtype), count)
    data = wide.astype(datatype.dtype, copy=False)
    if datatype.dtype.kind in "iu" and not np.array_equal(wide, data):
        limits = np.iinfo(datatype.dtype.name)
        raise InvalidRequestError(
            f"elements of input '{shown(name)}' must be {datatype.value}, so in [{limits.min}, {limits.max}]",
            field=shown(name),
        )
    return data.reshape(tuple(shape))


_WIDE: Final[Mapping[str, np.dtype[np.generic]]] = {
    "int_contents": np.dtype(np.int32),
    "uint_contents": np.dtype(np.uint32),
}
"""What holds every value of a field that smaller types share."""


def _outputs(model: TensorModel, message: Message) -> tuple[RequestedOutput, ...]:
    if not message.outputs:
        return ()
    known = {spec.name for spec in model.outputs}
    outputs: dict[str, RequestedOutput] = {}
    for entry in message.outputs:
        name = entry.name
        if name in outputs:
            raise InvalidRequestError(f"output '{shown(name)}' already exists in request", field=shown(name))
        if known and name not in known:
            raise InvalidRequestError(
                f"unexpected inference output '{shown(name)}' for model '{shown(model.name)}'", field=shown(name)
            )
        parameters = _parameters(entry.parameters)
        if _SHARED_MEMORY in parameters:
            raise UnsupportedError(f"output '{shown(name)}' asks for shared memory, which this server does not serve")
        classes = parameters.pop("classification", 0)
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
            raise InvalidRequestError(
                f"'classification' of output '{shown(name)}' must be an unsigned integer, got {shown(classes)}",
                field=shown(name),
            )
        parameters.pop("binary_data", None)  # HTTP's; here everything is binary.
        rest = {key: model_parameter(key, value) for key, value in parameters.items()}
        outputs[name] = RequestedOutput(name, classes, rest)
    return tuple(outputs.values())


def _parameters(entries: Message) -> dict[str, ParameterValue]:
    """The InferParameters of a map.

    Raises:
        InvalidRequestError: one has no value, or none that JSON could say too.
    """
    values: dict[str, ParameterValue] = {}
    if not entries:
        return values
    for name, entry in entries.items():
        kind = entry.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequestError(
                f"parameter '{shown(name)}' must have one of bool_param, int64_param, string_param, double_param and"
                " uint64_param",
                field=shown(name),
            )
        value: ParameterValue = getattr(entry, kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"parameter '{shown(name)}' must be a finite number", field=shown(name))
        values[name] = value
    return values


def _fill(entries: Message, parameters: Mapping[str, ParameterValue]) -> None:
    for name, value in parameters.items():
        entry = entries[name]
        if isinstance(value, bool):
            entry.bool_param = value
        elif isinstance(value, int):
            if value > _INT64_MAX:
                entry.uint64_param = value
            else:
                entry.int64_param = value
        elif isinstance(value, float):
            entry.double_param = value
        else:
            entry.string_param = value
