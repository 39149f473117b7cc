"""Errors of the python_backend API, as a user's model sees them."""

from __future__ import annotations

from tengserve_backend.errors import ErrorCode


class TritonModelException(Exception):  # noqa: N818 - the API's name
    """What a model raises to fail its requests, and what it gets for a wrong call."""


class TritonError:
    """An error in a response.

    Args:
        message: for the client.
        code: one of the constants of this class.
    """

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if not isinstance(message, str) or not isinstance(code, ErrorCode):
            raise TypeError("TritonError takes a message of type str and one of TritonError's codes")
        self._message = message
        self._code = code

    def message(self) -> str:
        """For the client."""
        return self._message

    def code(self) -> ErrorCode:
        """What kind of error it is."""
        return self._code
