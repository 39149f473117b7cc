"""Errors as Triton answers them: `{"error": "a sentence"}`, with the statuses of its error codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson
from starlette.responses import Response

from tengserve_adapter.http.errors import BodyTimeoutError, body_for, error_body, error_response, retry_after_of
from tengserve_backend.errors import (
    CodedError,
    DeadlineExceededError,
    ErrorCode,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
    ServerError,
    ShuttingDownError,
    TengserveError,
    UnsupportedError,
)

STATUSES: Final[Mapping[type[TengserveError], int]] = {
    RequestError: 400,
    UnsupportedError: 501,
    BodyTimeoutError: 408,
    ModelNotFoundError: 404,
    ModelNotReadyError: 503,
    OverloadedError: 503,
    ShuttingDownError: 503,
    RequestAbortedError: 503,
    DeadlineExceededError: 503,
    TengserveError: 500,
}
"""The map; a class that is not in it is answered like its nearest parent."""

CODES: Final[Mapping[ErrorCode, int]] = {
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}
"""Statuses of errors that carry Triton's own code."""


def status_for(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, CodedError):
        return CODES[error.code]
    return next((STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES), 500)


def triton_body(error: BaseException) -> bytes:
    """The JSON of an error, for a reply or an event. The unexpected is logged, and answered without details."""
    # MindIE's words for an error are not Triton's.
    known = isinstance(error, RequestError | ServerError)
    body = error_body(str(error), "") if known else body_for(error)
    return orjson.dumps({"error": orjson.loads(body)["error"]})


def triton_response(error: BaseException) -> Response:
    """The whole reply."""
    return error_response(status_for(error), triton_body(error), retry_after_of(error))
