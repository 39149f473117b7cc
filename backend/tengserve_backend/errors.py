"""Every error that tengserve raises, split by whose mistake it is.

```
TengserveError
├── RequestError              the client's mistake; carries the field it is about
│   ├── InvalidRequestError       a body or a field that breaks its rule
│   ├── RequestTooLargeError      a body over the size limit
│   ├── PromptTooLongError        more prompt tokens than the model takes
│   ├── InvalidTokenIdError       a token id outside the vocabulary
│   ├── UnsupportedError          what the protocol has, and is not offered here
│   └── ModelNotFoundError        no such model or version
├── ServerError               ours; the same request may succeed later
│   ├── ModelNotReadyError        loading, unloading, or failed to load
│   ├── OverloadedError           a queue is full; carries Retry-After
│   ├── ShuttingDownError         draining: nothing new is admitted
│   ├── DeadlineExceededError     the request's own timeout passed
│   ├── RequestAbortedError       cancelled before it ended
│   ├── GenerationFailedError     this request failed alone
│   ├── CodedError                carries Triton's code
│   │   ├── ModelExecutionError       a user's model.py failed, or answered with an error
│   │   └── ControlError              what was asked of the model repository is refused, or failed
│   ├── OperatorError             a device's operator would have been called against its rules
│   └── EngineFailedError         the engine's loop or device is gone
│       └── DeviceLostError           the device failed: the process has to end
└── ConfigurationError        the operator's mistake; carries file, line and column
```

Nothing here knows HTTP or gRPC: each dialect maps the tree to its own status and body in one place. Messages are
safe to send to a client: they name the field, the rule and the value given, never a path or a traceback.
"""

from __future__ import annotations

import enum
import re

_MAX_VALUE_CHARS = 64
# Controls (C0, DEL, C1), line and paragraph separators, marks that turn the direction of text, surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_REASON_CHARS = 300
_MAX_SEARCHED_CHARS = 2000
_PATH = re.compile(r"(?:\w+:/)?/[^\s/'\"`,;:)\]>]+(?:/[^\s/'\"`,;:)\]>]*)+")


def one_line(text: str) -> str:
    """Text that whoever reads it sees as it is: every control character, line break and surrogate escaped.

    Nothing that a client or a folder's name says may make lines of its own, or move a terminal's cursor.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shown(value: object, limit: int = _MAX_VALUE_CHARS) -> str:
    """The value as it may be echoed in an error: on one line, and never longer than 64 characters of the value."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return one_line(text)


def foreign_reason(error: BaseException, folder: str = "") -> str:
    """What a library complains of, as a client may see it: the first line, bounded, without any path.

    Args:
        error: any exception.
        folder: the model's folder if there is one, called so; other paths become "...".
    """
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a foreign exception's own code, called where its failure is being handled
        text = ""
    line = next((line for line in text.splitlines() if line.strip()), "").strip() or type(error).__name__
    # Cut first, generously: the search for paths is quadratic, and a client's own words may be in the line.
    line = line[:_MAX_SEARCHED_CHARS]
    if folder:
        line = line.replace(folder, "the model's folder")
    return shown(_PATH.sub("...", line), _MAX_REASON_CHARS)


class TengserveError(Exception):
    """Root of the tree.

    Attributes:
        message: one sentence for the person who reads the reply.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(TengserveError):
    """The client's mistake.

    Attributes:
        field: the request field that the error is about, or None when it is about the whole body.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(RequestError):
    """A body that is no request, or a field whose type or value breaks its rule."""


class RequestTooLargeError(RequestError):
    """A body larger than the server takes."""


class PromptTooLongError(RequestError):
    """More prompt tokens than the model's limits leave room for."""


class InvalidTokenIdError(RequestError):
    """A token id of the prompt, or of logit_bias, outside the model's vocabulary."""


class UnsupportedError(RequestError):
    """What the protocol has, and this server or this model does not offer."""


class ModelNotFoundError(RequestError):
    """No such model, or no such version of it."""


class ServerError(TengserveError):
    """The server could not do what was rightly asked."""


class ModelNotReadyError(ServerError):
    """The model exists but is loading, unloading, or failed to load."""


class OverloadedError(ServerError):
    """A queue, or the room for request bodies, is full.

    Attributes:
        retry_after_s: whole seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(ServerError):
    """The server drains: it finishes what it has and admits nothing new."""


class DeadlineExceededError(ServerError):
    """The request's timeout passed before the answer was complete."""


class RequestAbortedError(ServerError):
    """The request was cancelled, by its client or by the server's stop, before it ended."""


class GenerationFailedError(ServerError):
    """This request made the model fail; no other request was touched."""


class ErrorCode(enum.Enum):
    """Triton's error codes, with its numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class CodedError(ServerError):
    """What is answered with a code of Triton's that no other class has.

    Attributes:
        code: of Triton.
    """

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class ModelExecutionError(CodedError):
    """A user's model failed, or answered this request with an error; the code is its choice."""


class ControlError(CodedError):
    """A load, an unload or a setting that is refused, or failed."""


class OperatorError(TengserveError):
    """A device's operator would have been called against its documented rules, and was not; no client sees this one."""


class EngineFailedError(ServerError):
    """The engine's loop or its device is gone; no request can be served."""


class DeviceLostError(EngineFailedError):
    """A device failed, and nothing that this process tries on it can succeed any more."""


class ConfigurationError(TengserveError):
    """The operator's mistake, in a file or a setting.

    Attributes:
        file, line, column: where, as far as it is known; line and column count from 1.
    """

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, column: int | None = None
    ) -> None:
        where = ":".join(str(part) for part in (file, line, column) if part is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.file = file
        self.line = line
        self.column = column
