"""The one place where an error becomes a gRPC status: Triton's codes, one to one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import grpc

from tengserve_backend.errors import ErrorCode, TengserveError
from tengserve_backend.inference.codes import triton_code

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 4000
"""A status travels in headers, which proxies bound to some kilobytes."""


CODES: Final[Mapping[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}
"""Triton's codes, as its own gRPC server tells them."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Code and message of an error; the unexpected is logged and told without details."""
    if not isinstance(error, TengserveError):
        _LOG.error("Unexpected error while serving a request", exc_info=error)
        return grpc.StatusCode.INTERNAL, "Internal server error."
    return CODES[triton_code(error)], _bounded(error.message)


def _bounded(message: str) -> str:
    data = message.encode("utf-8", "backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - 3] + b"..."
    return data.decode("utf-8", "ignore")
