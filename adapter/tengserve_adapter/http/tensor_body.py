"""The body of a request with tensors: read within its limits, decoded, and split into JSON and binary data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope

from tengserve_adapter.http.body import INLINE_BYTES, has_too_many_values, lone_surrogate, read_body
from tengserve_adapter.http.body_rules import BodyRules, set_body_rules
from tengserve_adapter.http.encoding import Encoding, decompress, encoding_of
from tengserve_adapter.http.errors import RETRY_AFTER_S
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.triton_errors import triton_response
from tengserve_backend.errors import InvalidRequestError, OverloadedError, RequestTooLargeError, UnsupportedError
from tengserve_backend.generation.checks import given

_T = TypeVar("_T")

HEAD_LENGTH: Final = "inference-header-content-length"

MAX_VALUES: Final = 4 * 1024 * 1024
MAX_CONTAINERS: Final = 512 * 1024
"""Values in the JSON of a body, and arrays and objects among them. Some 32 bytes of memory each; more is for binary
data, which has no such limit."""

_DECOMPRESSED_AT_ONCE: Final = 2
"""Bodies that are being decompressed and not yet counted."""


@dataclass(frozen=True, slots=True)
class TensorBody:
    """A body.

    Attributes:
        head: its JSON; empty in a raw binary request.
        tail: the binary data.
        raw: it is nothing but binary data.
    """

    head: dict[str, object]
    tail: bytes
    raw: bool


class ContentRoom:
    """Counts the bytes of bodies, decompressed, until they are answered: their tensors live as long."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self.decompressing = asyncio.Semaphore(_DECOMPRESSED_AT_ONCE)

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count a body until the context ends.

        Raises:
            OverloadedError: there is no room.
        """
        if self._held_bytes + size > self._max_bytes:
            raise OverloadedError("Too many request bodies are held at once.", retry_after_s=RETRY_AFTER_S)
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size


@asynccontextmanager
async def content_of(
    scope: Scope, receive: Receive, settings: HttpSettings, room: ContentRoom, *, compressed: bool
) -> AsyncIterator[bytes]:
    """The whole content of a body, counted until the context ends.

    Args:
        scope, receive: of the request, whose body has not been asked for.
        settings: its limits.
        room: for all bodies of the route.
        compressed: gzip and deflate are taken.

    Raises:
        UnsupportedError: another encoding.
        InvalidRequestError: damaged.
        RequestTooLargeError: more than the limit once it is decoded.
        OverloadedError: no room.
        ClientDisconnected: the client left.
        TengserveError: what is wrong with the way in which the body arrived.
    """
    limit = settings.max_tensor_bytes
    set_body_rules(scope, BodyRules(limit, encoded=True, respond=lambda error: _respond(error, limit)))
    encoding = _encoding(Headers(scope=scope), compressed=compressed)
    content = await read_body(receive)
    if encoding is not None:
        content = await _decompressed(encoding, content, limit, room)
    with room.hold(len(content)):
        yield content


async def _decompressed(encoding: Encoding, raw: bytes, limit: int, room: ContentRoom) -> bytes:
    try:
        # A small body may become a large one, which is counted only when it is there.
        async with room.decompressing:
            return await in_thread_if(len(raw) > INLINE_BYTES // 8, lambda: decompress(encoding, raw, limit))
    except RequestTooLargeError:
        raise _too_large(limit) from None


def _respond(error: BaseException, limit: int) -> Response:
    return triton_response(_too_large(limit) if isinstance(error, RequestTooLargeError) else error)


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"request body of more than {limit} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --max-tensor-bytes to increase the limit."
    )


def _encoding(headers: Headers, *, compressed: bool) -> Encoding | None:
    header = headers.get("content-encoding", "")
    try:
        encoding = encoding_of(header)
    except KeyError:
        encoding = None
        if compressed:
            raise UnsupportedError(
                f"Unsupported content-encoding {given(header)}, only 'gzip', 'deflate' and 'identity' are supported"
            ) from None
        raise _identity_only() from None
    if encoding is not None and not compressed:
        raise _identity_only()
    return encoding


def _identity_only() -> InvalidRequestError:
    return InvalidRequestError("Unsupported content-encoding, only 'identity' is supported.")


def split(content: bytes, head_length: str | None) -> TensorBody:
    """The parts of a body.

    Args:
        content: all of it.
        head_length: the header that tells the length of the JSON, None when there is none.

    Raises:
        InvalidRequestError: that length is no length in this body, or the JSON is none.
    """
    if head_length is None:
        return TensorBody(load_object(content), b"", raw=False)
    if not (head_length.isascii() and head_length.isdigit() and len(head_length) <= 19):
        raise _wrong_length(head_length, content)
    length = int(head_length)
    if length > len(content):
        raise _wrong_length(head_length, content)
    if length == 0:
        return TensorBody({}, content, raw=True)
    return TensorBody(load_object(content[:length]), content[length:], raw=False)


def _wrong_length(head_length: str, content: bytes) -> InvalidRequestError:
    return InvalidRequestError(
        f"Inference-Header-Content-Length must be an integer in [0, {len(content)}], got {given(head_length)}"
    )


def load_object(raw: bytes) -> dict[str, object]:
    """The JSON object of a request with tensors: UTF-8, of equal keys the last wins, NaN and Infinity are numbers.

    Raises:
        InvalidRequestError: it is something else, or has too many values.
    """
    value = load_json(raw)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"failed to parse the request JSON buffer: must be an object, got {given(value)}")
    return value


def load_json(raw: bytes) -> object:
    """Any JSON; see load_object."""
    if len(raw) <= INLINE_BYTES:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            # What is wrong with it, if it is not just a NaN, `parse_json` says better.
            pass
    return parse_json(raw)


def parse_json(raw: bytes, **hooks: Any) -> object:
    """JSON by the standard parser, in whose loops the event loop gets its turns.

    Args:
        raw: the text.
        hooks: further arguments of json.loads.

    Raises:
        InvalidRequestError: it is no JSON, has too many values, or a string that is no text.
    """
    if len(raw) > INLINE_BYTES and has_too_many_values(raw, MAX_VALUES, MAX_CONTAINERS):
        raise _no_json(
            f"more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects; send tensors as binary data"
        )
    try:
        value: object = json.loads(raw.decode("utf-8"), parse_int=_integer, parse_float=_float, **hooks)
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _no_json("nested too deep") from None
    except ValueError:
        raise _no_json("a number has too many digits") from None
    if (position := lone_surrogate(raw)) is not None:
        raise _no_json(f"a lone surrogate at byte {position} is no text")
    return value


def _integer(digits: str) -> int:
    # Functions of Python's own, so that a worker thread with many numbers lets the event loop run.
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def _no_json(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"failed to parse the request JSON buffer: {problem}")


async def in_thread_if(large: bool, work: Callable[[], _T]) -> _T:
    """What `work` returns; a large amount of work is done in a thread, so that the event loop goes on."""
    return await asyncio.to_thread(work) if large else work()
