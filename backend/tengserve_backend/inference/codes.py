"""Triton's error code of every error in the tree: what a model that asks another, or a client of Triton, gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tengserve_backend.errors import (
    CodedError,
    ConfigurationError,
    DeadlineExceededError,
    ErrorCode,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
    ShuttingDownError,
    TengserveError,
    UnsupportedError,
)

CODES: Final[Mapping[type[TengserveError], ErrorCode]] = {
    RequestError: ErrorCode.INVALID_ARG,
    UnsupportedError: ErrorCode.UNSUPPORTED,
    ModelNotFoundError: ErrorCode.NOT_FOUND,
    ModelNotReadyError: ErrorCode.UNAVAILABLE,
    OverloadedError: ErrorCode.UNAVAILABLE,
    ShuttingDownError: ErrorCode.UNAVAILABLE,
    # As Triton answers a request whose `timeout` ran out.
    DeadlineExceededError: ErrorCode.UNAVAILABLE,
    RequestAbortedError: ErrorCode.CANCELLED,
    ConfigurationError: ErrorCode.INVALID_ARG,
    TengserveError: ErrorCode.INTERNAL,
}
"""A class that is not here has the code of its nearest parent."""


def triton_code(error: TengserveError) -> ErrorCode:
    """The code of an error; its own when it carries one."""
    if isinstance(error, CodedError):
        return error.code
    return next(CODES[parent] for parent in type(error).__mro__ if parent in CODES)
