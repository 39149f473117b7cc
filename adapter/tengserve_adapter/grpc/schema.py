"""The messages of every service here, in one descriptor pool that nobody else in the process sees."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.repository.triton_schema import GRPC_SERVICE, MODEL_CONFIG, triton_schema

INFERENCE: Final = "inference.GRPCInferenceService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTIONS: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

Message = Any
"""A protobuf message; its class is made at run time."""

MAX_FIELDS: Final = 16 * 1024
"""Fields of a message and of those within it, elements of tensors not counted. Millions fit into a message that take
gigabytes and a minute."""
_ELEMENTS: Final = "inference.InferTensorContents"
_SMALL_BYTES: Final = 2 * MAX_FIELDS

_HEALTH_PROTO: Final = """
    name: "grpc/health/v1/health.proto" package: "grpc.health.v1" syntax: "proto3"
    message_type { name: "HealthCheckRequest"
        field { name: "service" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
    message_type { name: "HealthCheckResponse"
        field { name: "status" number: 1 type: TYPE_ENUM label: LABEL_OPTIONAL
            type_name: ".grpc.health.v1.HealthCheckResponse.ServingStatus" }
        enum_type { name: "ServingStatus"
            value { name: "UNKNOWN" number: 0 } value { name: "SERVING" number: 1 }
            value { name: "NOT_SERVING" number: 2 } value { name: "SERVICE_UNKNOWN" number: 3 } } }
    service { name: "Health"
        method { name: "Check"
            input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse" }
        method { name: "Watch" server_streaming: true
            input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse" } }
"""

_REFLECTION_PROTO: Final = """
    name: "grpc/reflection/VERSION/reflection.proto" package: "grpc.reflection.VERSION" syntax: "proto3"
    message_type { name: "ServerReflectionRequest"
        oneof_decl { name: "message_request" }
        field { name: "host" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "file_by_filename" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
        field { name: "file_containing_symbol" number: 4 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
        field { name: "file_containing_extension" number: 5 type: TYPE_MESSAGE label: LABEL_OPTIONAL oneof_index: 0
            type_name: ".grpc.reflection.VERSION.ExtensionRequest" }
        field { name: "all_extension_numbers_of_type" number: 6 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
        field { name: "list_services" number: 7 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 } }
    message_type { name: "ExtensionRequest"
        field { name: "containing_type" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "extension_number" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL } }
    message_type { name: "ServerReflectionResponse"
        oneof_decl { name: "message_response" }
        field { name: "valid_host" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "original_request" number: 2 type: TYPE_MESSAGE label: LABEL_OPTIONAL
            type_name: ".grpc.reflection.VERSION.ServerReflectionRequest" }
        field { name: "file_descriptor_response" number: 4 type: TYPE_MESSAGE label: LABEL_OPTIONAL oneof_index: 0
            type_name: ".grpc.reflection.VERSION.FileDescriptorResponse" }
        field { name: "all_extension_numbers_response" number: 5 type: TYPE_MESSAGE label: LABEL_OPTIONAL oneof_index: 0
            type_name: ".grpc.reflection.VERSION.ExtensionNumberResponse" }
        field { name: "list_services_response" number: 6 type: TYPE_MESSAGE label: LABEL_OPTIONAL oneof_index: 0
            type_name: ".grpc.reflection.VERSION.ListServiceResponse" }
        field { name: "error_response" number: 7 type: TYPE_MESSAGE label: LABEL_OPTIONAL oneof_index: 0
            type_name: ".grpc.reflection.VERSION.ErrorResponse" } }
    message_type { name: "FileDescriptorResponse"
        field { name: "file_descriptor_proto" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
    message_type { name: "ExtensionNumberResponse"
        field { name: "base_type_name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "extension_number" number: 2 type: TYPE_INT32 label: LABEL_REPEATED } }
    message_type { name: "ListServiceResponse"
        field { name: "service" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
            type_name: ".grpc.reflection.VERSION.ServiceResponse" } }
    message_type { name: "ServiceResponse"
        field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
    message_type { name: "ErrorResponse"
        field { name: "error_code" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
        field { name: "error_message" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL } }
    service { name: "ServerReflection"
        method { name: "ServerReflectionInfo" client_streaming: true server_streaming: true
            input_type: ".grpc.reflection.VERSION.ServerReflectionRequest"
            output_type: ".grpc.reflection.VERSION.ServerReflectionResponse" } }
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """The pool and the classes of its messages.

    Attributes:
        pool: holds every file.
        messages: by the name without its package, those of the package `inference`.
    """

    pool: descriptor_pool.DescriptorPool
    messages: Mapping[str, type[Message]]

    def service(self, name: str) -> Any:
        """The descriptor of a service, such as INFERENCE."""
        return self.pool.FindServiceByName(name)


@functools.cache
def schema() -> Schema:
    """The schema; made once.

    Raises:
        ConfigurationError: the installed tritonclient has none.
    """
    pool = descriptor_pool.DescriptorPool()
    files = [triton_schema(MODEL_CONFIG), triton_schema(GRPC_SERVICE), _file(_HEALTH_PROTO)]
    files += [_file(_REFLECTION_PROTO.replace("VERSION", version)) for version in ("v1", "v1alpha")]
    for file in files:
        pool.Add(file)
    messages = {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
        for file in files[:2]
        for message in file.message_type
    }
    return Schema(pool, messages)


def message_class(descriptor: Any) -> type[Message]:
    """The class of a message, of one in this pool."""
    found: type[Message] = message_factory.GetMessageClass(descriptor)
    return found


def parse(kind: type[Message], data: bytes) -> Message:
    """The message in these bytes.

    Raises:
        InvalidRequestError: they hold another message or none.
    """
    name = kind.DESCRIPTOR.full_name
    if len(data) > _SMALL_BYTES and _fields_left(data, 0, len(data), kind.DESCRIPTOR, MAX_FIELDS) < 0:
        raise InvalidRequestError(f"a message {name} has at most {MAX_FIELDS} fields, or these bytes are none")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequestError(f"the request is no message {name}") from None


def _fields_left(data: bytes, offset: int, end: int, kind: Any, left: int) -> int:
    """How many fewer fields than `left` there are, those of messages within messages counted.

    Args:
        data: holds the message from `offset` to `end`.
        kind: descriptor of the message.
        left: how many there may be.

    Returns:
        Less than 0 when there are more, or these bytes are no message.
    """
    while offset < end:
        left -= 1
        if left < 0:
            return -1
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:
                _, offset = _varint(data, offset)
            case 1:
                offset += 8
            case 2:
                size, offset = _varint(data, offset)
                field = kind.fields_by_number.get(tag >> 3)
                inner = None if field is None else field.message_type
                if inner is not None and inner.full_name != _ELEMENTS and offset + size <= end:
                    left = _fields_left(data, offset, offset + size, inner, left)
                offset += size
            case 5:
                offset += 4
            case _:
                return -1
    return left if offset == end else -1


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number and the offset behind it, which is past the end when the bytes end within the number."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            break
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    return 0, len(data) + 1


def _file(text: str) -> descriptor_pb2.FileDescriptorProto:
    return text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
