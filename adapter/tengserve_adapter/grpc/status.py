"""The one place where an error becomes a gRPC status: Triton's codes, one to one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import grpc

from tengserve_backend.errors import (
    ConfigurationError,
    DeadlineExceededError,
    ErrorCode,
    ModelExecutionError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
    ServerError,
    ShuttingDownError,
    TengserveError,
)

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 4000
"""A status travels in headers, which proxies bound to some kilobytes."""


class NotServedError(RequestError):
    """A part of the protocol that this server has not."""


CODES: Final[Mapping[type[BaseException], grpc.StatusCode]] = {
    NotServedError: grpc.StatusCode.UNIMPLEMENTED,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigurationError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotReadyError: grpc.StatusCode.UNAVAILABLE,
    OverloadedError: grpc.StatusCode.UNAVAILABLE,
    ShuttingDownError: grpc.StatusCode.UNAVAILABLE,
    # As Triton answers a request whose `timeout` ran out; DEADLINE_EXCEEDED is the client's own clock.
    DeadlineExceededError: grpc.StatusCode.UNAVAILABLE,
    RequestAbortedError: grpc.StatusCode.CANCELLED,
    ServerError: grpc.StatusCode.INTERNAL,
}
"""The map; a class that is not in it is answered like its nearest parent."""

MODEL_CODES: Final[Mapping[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}
"""What a user's model may give its error."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Code and message of an error; the unexpected is logged and told without details."""
    if not isinstance(error, TengserveError):
        _LOG.error("Unexpected error while serving a request", exc_info=error)
        return grpc.StatusCode.INTERNAL, "Internal server error."
    if isinstance(error, ModelExecutionError):
        return MODEL_CODES[error.code], _bounded(error.message)
    code = next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), grpc.StatusCode.INTERNAL)
    return code, _bounded(error.message)


def _bounded(message: str) -> str:
    data = message.encode("utf-8", "backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - 3] + b"..."
    return data.decode("utf-8", "ignore")
