"""The plain functions and constants of triton_python_backend_utils."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from tengserve_backend.inference import Datatype
from tengserve_backend.inference.datatypes import Array
from tengserve_backend.python_backend.api.messages import InferenceRequest, InferenceResponse
from tengserve_backend.python_backend.api.tensor import TRITON_TYPES, Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_NUMBERED = {number: datatype for number, datatype in enumerate(TRITON_TYPES, 1) if datatype is not Datatype.BF16}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    datatype.config_name: bool if datatype is Datatype.BOOL else datatype.dtype.type for datatype in _NUMBERED.values()
}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name, or None."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The configuration's input of that name, or None."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The configuration's output of that name, or None."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration says that a request may have any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a name such as "TYPE_FP32"; KeyError for another."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of Triton's number of a datatype, None for one that numpy has not."""
    datatype = _NUMBERED.get(data_type)
    return None if datatype is None else datatype.dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Triton's number of a numpy type, None for one that Triton has not."""
    dtype = np.dtype(data_type)
    if dtype.kind == "S":
        dtype = np.dtype(np.object_)
    return next((number for number, datatype in _NUMBERED.items() if datatype.dtype == dtype), None)


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """Each element's length in four little-endian bytes before its bytes; () for an empty tensor, None for no BYTES."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    parts = []
    for element in input_tensor.reshape(-1).tolist():
        data = element if isinstance(element, bytes) else str(element).encode("utf-8")
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The flat array of bytes that `serialize_byte_tensor` made such a text of."""
    elements, offset = [], 0
    while offset < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, offset)
        offset += 4
        if offset + length > len(encoded_tensor):
            raise ValueError("the last element is incomplete")
        elements.append(bytes(encoded_tensor[offset : offset + length]))
        offset += length
    made = np.empty(len(elements), np.object_)
    made[:] = elements
    return made
