"""Parsing a request body: bounded in depth, in values, and in how long the event loop waits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from starlette.types import Receive

from tengserve_adapter.http.disconnect import ClientDisconnected
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.generation.limits import MAX_PROMPT_TOKENS

INLINE_BYTES: Final = 256 * 1024
"""A larger body is parsed in a worker thread: about a millisecond of work is what the event loop can spare."""

MAX_DEPTH: Final = 64
"""Arrays and objects within each other, the body itself counted; no dialect needs more than a handful."""

MAX_VALUES: Final = MAX_PROMPT_TOKENS + 64 * 1024
MAX_CONTAINERS: Final = 16 * 1024
"""Values in a body, and arrays and objects among them. The longest array that means anything holds one prompt's tokens.
Without these limits, 40 MB of `[],[],...` cost a gigabyte of memory and seconds in which no stream moves."""

_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in JSON; a pair of surrogates is one, and the group is a surrogate that has no other half."""

_T = TypeVar("_T")


async def read_body(receive: Receive) -> bytes:
    """The whole body, which `http/intake.py` hands over in one message.

    Raises:
        ClientDisconnected: the client left.
        TengserveError: what is wrong with the way in which the body arrived.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    body: bytes = message["body"]
    return body


async def parse_body(raw: bytes, parse: Callable[[dict[str, object]], _T]) -> _T:
    """`parse` of the JSON object in a body; both run in a worker thread when the body is big.

    Raises:
        InvalidRequestError: the body is no JSON object, or what `parse` says.
    """
    if len(raw) <= INLINE_BYTES:
        return parse(load_object(raw))
    return await asyncio.to_thread(lambda: parse(_load_big_object(raw)))


def _load_big_object(raw: bytes) -> dict[str, object]:
    if has_too_many_values(raw, MAX_VALUES, MAX_CONTAINERS):
        raise _no_json(f"more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects")
    return load_object(raw)


def has_too_many_values(raw: bytes, max_values: int, max_containers: int) -> bool:
    """Whether JSON has more values, or arrays and objects, than these: in linear time and constant memory."""
    # Nearly always the plain counts settle it; a prompt may hold any number of commas and brackets, though.
    plain_values, plain_containers = raw.count(b","), raw.count(b"[") + raw.count(b"{")
    if plain_values <= max_values and plain_containers <= max_containers:
        return False
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = containers = strings = start = 0
    while True:
        quote = raw.find(b'"', start)
        end = quote if quote >= 0 else len(raw)
        values += raw.count(b",", start, end)
        containers += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        strings += 1
        if values > max_values or containers > max_containers or strings > 2 * max_values:
            return True
        start = raw.find(b'"', quote + 1) + 1
        if quote < 0 or start == 0:
            return False


def lone_surrogate(raw: bytes) -> int | None:
    """Where JSON in UTF-8 has an escape of half a character, such as "\\ud800"; None when it has none.

    No text has one, and neither answers nor logs nor tokenizers can take it, so no string of a client keeps it.
    """
    # Nearly no body has such an escape, not even of a whole character.
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return None
    return next((found.start() for found in _ESCAPE.finditer(raw) if found[1]), None)


def load_object(raw: bytes) -> dict[str, object]:
    """The JSON object in a body: strict JSON in UTF-8 without lone surrogates, integers exact, the last of equal keys
    wins.

    A number such as 1e400 becomes infinite here and is refused where it is used, under its field's name.

    Raises:
        InvalidRequestError: it is something else.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _no_json(_TOO_DEEP) from None
    except ValueError:
        # The interpreter's bound on converting digits, which keeps conversion from taking quadratic time.
        raise _no_json("a number has too many digits") from None
    if (position := lone_surrogate(raw)) is not None:
        raise _no_json(f"a lone surrogate at byte {position} is no text")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {_JSON_NAMES[type(value)]}.")
    # Without that many brackets there is no such depth, and nearly no body has them.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    """Refuse a value nested deeper than MAX_DEPTH, level by level; the parser's own limit differs by interpreter."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _no_json(_TOO_DEEP)


def _parse_int(digits: str) -> int:
    # A function of Python's own, not `int`: with it the parser passes the interpreter's switch points, so that a
    # worker thread with millions of token ids lets the event loop run.
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise _no_json(f"{name} is not JSON")


def _no_json(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"Failed to parse request context to json: {problem}.")


_TOO_DEEP: Final = f"nested more than {MAX_DEPTH} deep"

_JSON_NAMES: Final = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
