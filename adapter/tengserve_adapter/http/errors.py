"""The one place where an error becomes a status and a body, `{"error": ..., "error_type": ...}`.

Statuses are those of MindIE's server. Every body is valid JSON, under 4 KiB, and says nothing of a traceback or a path.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson
from starlette.responses import Response

from tengserve_backend.errors import (
    ControlError,
    DeadlineExceededError,
    DeviceLostError,
    EngineFailedError,
    GenerationFailedError,
    InvalidRequestError,
    InvalidTokenIdError,
    ModelExecutionError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestAbortedError,
    RequestError,
    RequestTooLargeError,
    ServerError,
    ShuttingDownError,
    TengserveError,
    UnsupportedError,
)

_LOG = logging.getLogger(__name__)

MAX_ERROR_BYTES: Final = 4000
RETRY_AFTER_S: Final = 5
"""Retry-After while a model loads or the server drains: about as long as a load balancer needs to look elsewhere."""


class MalformedRequestError(RequestError):
    """What was sent is not HTTP/1.1; the connection is closed."""


class HeadTooLargeError(RequestError):
    """More than 64 KiB of request line and headers; the connection is closed."""


class TooManyConnectionsError(ServerError):
    """Too many clients are connected; health probes still get through."""


class BodyTimeoutError(RequestError):
    """A body that did not arrive in time."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """How one class of errors is answered.

    Attributes:
        status: HTTP status.
        error_type: MindIE's word for it.
        message: a documented text that replaces the error's own; None keeps that.
        retry_after_s: the Retry-After header, unless the error carries its own; None sends none.
    """

    status: int
    error_type: str
    message: str | None = None
    retry_after_s: int | None = None


REPLIES: Final[Mapping[type[TengserveError], ErrorReply]] = {
    MalformedRequestError: ErrorReply(400, "Bad Request"),
    HeadTooLargeError: ErrorReply(431, "Request Header Fields Too Large"),
    InvalidRequestError: ErrorReply(422, "Input Validation Error"),
    RequestTooLargeError: ErrorReply(413, "Input Validation Error"),
    BodyTimeoutError: ErrorReply(408, "Request Timeout"),
    PromptTooLongError: ErrorReply(424, "Generation Error"),
    InvalidTokenIdError: ErrorReply(424, "Generation Error"),
    UnsupportedError: ErrorReply(501, "Not Implemented"),
    ModelNotFoundError: ErrorReply(404, "NotFoundError"),
    OverloadedError: ErrorReply(429, "Too Many Requests"),
    TooManyConnectionsError: ErrorReply(503, "Service Unavailable", retry_after_s=RETRY_AFTER_S),
    ModelNotReadyError: ErrorReply(503, "Service Unavailable", retry_after_s=RETRY_AFTER_S),
    ShuttingDownError: ErrorReply(503, "Service Unavailable", retry_after_s=RETRY_AFTER_S),
    RequestAbortedError: ErrorReply(503, "Service Unavailable", retry_after_s=RETRY_AFTER_S),
    DeadlineExceededError: ErrorReply(500, "Incomplete Generation", "Engine callback timeout: client timeout"),
    GenerationFailedError: ErrorReply(500, "Incomplete Generation"),
    ModelExecutionError: ErrorReply(500, "Incomplete Generation"),
    ControlError: ErrorReply(500, "Internal Server Error"),
    EngineFailedError: ErrorReply(500, "Incomplete Generation"),
    DeviceLostError: ErrorReply(500, "Incomplete Generation"),
    RequestError: ErrorReply(422, "Input Validation Error"),
    ServerError: ErrorReply(500, "Incomplete Generation"),
}
"""The map; a class that is not in it is answered like its nearest parent."""

_UNEXPECTED: Final = ErrorReply(500, "Internal Server Error", "Internal server error.")


def reply_for(error: BaseException) -> ErrorReply:
    """The row of the map for an error; anything that is no request or server error is answered without details."""
    for cls in type(error).__mro__:
        row = REPLIES.get(cls)
        if row is not None:
            return row
    return _UNEXPECTED


def error_body(message: str, error_type: str) -> bytes:
    """The JSON of an error. A message too long for 4 KiB is cut."""
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")
    body = orjson.dumps({"error": message, "error_type": error_type})
    while len(body) > MAX_ERROR_BYTES:
        message = message[: len(message) // 2] + "..."
        body = orjson.dumps({"error": message, "error_type": error_type})
    return body


def body_for(error: BaseException) -> bytes:
    """The JSON of an error, for a reply or for a stream that already started. The unexpected is logged."""
    row = reply_for(error)
    if row is _UNEXPECTED:
        _LOG.error("Unexpected error while serving a request", exc_info=error)
    return error_body(row.message or str(error), row.error_type)


def retry_after_of(error: BaseException) -> dict[str, str]:
    """The Retry-After header of an error's reply, if it has one."""
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else reply_for(error).retry_after_s
    return {} if retry_after_s is None else {"Retry-After": str(max(1, retry_after_s))}


def response_for(error: BaseException) -> Response:
    """The whole reply."""
    return error_response(reply_for(error).status, body_for(error), retry_after_of(error))


def error_response(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    """A reply with an error's body."""
    return Response(body, status_code=status, headers=dict(headers), media_type="application/json")
