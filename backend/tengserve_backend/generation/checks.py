"""Checks of single values against their row of the table, with one form of error text for all dialects.

Integers are JSON integers only, not `20.0`, `"20"` or `true`; a float field takes an integer too; NaN, infinities and
lone surrogates are refused. Every message names the field, its rule and the value given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.fields import MAX_STOP_CHARS, MAX_STOP_STRINGS, Bounds, Field, Kind, Rule

MAX_TOKEN_ID: Final = 1024 * 1024
"""Largest token id that is looked at at all (MindIE native API, /infer_token: input_id).

The vocabulary is the engine's check."""

Checked = bool | int | float | str | tuple[int, ...] | tuple[str, ...] | dict[str, object]


def check_value(field: Field, rule: Rule, value: object) -> Checked:
    """The value as the request uses it.

    Raises:
        InvalidRequestError: it breaks the field's rule.
    """
    return _CHECKS[field.kind](field.name, rule.bounds, value)


def given(value: object) -> str:
    """A JSON value as an error may echo it: in JSON's spelling, short, and cheap however large the value is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{shown(value)}"'
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return shown(value)


def wrong_type(name: str, type_name: str, value: object) -> InvalidRequestError:
    """The error for a value of another JSON type."""
    return InvalidRequestError(f"{name} must be {type_name} type, got {given(value)}.", field=name)


def out_of_range(name: str, rule: object, value: object, *, label: str | None = None) -> InvalidRequestError:
    """The error for a value that breaks its rule; `label` names a part of the field, such as an element."""
    return InvalidRequestError(f"Parameter {label or name} must be {rule}, got {given(value)}.", field=name)


def _boolean(name: str, bounds: Bounds | None, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "boolean", value)
    return value


def _whole(type_name: str) -> Callable[[str, Bounds | None, object], int]:
    def check(name: str, bounds: Bounds | None, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, type_name, value)
        if bounds is not None and not bounds.admits(value):
            raise out_of_range(name, bounds, value)
        return value

    return check


def _float(name: str, bounds: Bounds | None, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(name, "float", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise out_of_range(name, "a finite number", value)
    if bounds is not None and not bounds.admits(number):
        raise out_of_range(name, bounds, value)
    return number


def _check_unicode(name: str, value: str) -> None:
    if value.isascii():
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} must be valid Unicode text, got a lone surrogate at character {error.start}.", field=name
        ) from None


def _string(name: str, bounds: Bounds | None, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "string", value)
    if bounds is not None and not bounds.admits(len(value)):
        raise InvalidRequestError(
            f"Parameter {name} must have a number of characters {bounds}, got {len(value)}.", field=name
        )
    if not value.isprintable():
        raise out_of_range(name, "printable characters", value)
    return value


def _prompt(name: str, bounds: Bounds | None, value: object) -> str:
    if isinstance(value, list):
        raise InvalidRequestError(
            f"{name} must be a string, got an array: multimodal input is not served yet by this server.", field=name
        )
    if not isinstance(value, str):
        raise wrong_type(name, "string", value)
    if bounds is not None and not bounds.admits(len(value)):
        raise InvalidRequestError(
            f"Parameter {name} must have a number of characters {bounds}, got {len(value)}.", field=name
        )
    _check_unicode(name, value)
    return value


def _token_ids(name: str, bounds: Bounds | None, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type(name, "array", value)
    if bounds is not None and not bounds.admits(len(value)):
        raise InvalidRequestError(
            f"Parameter {name} must have a number of elements {bounds}, got {len(value)}.", field=name
        )
    # Passes over the whole list run in C; the index of an offender is looked for only when there is one.
    if set(map(type, value)) != {int}:
        index = next(i for i, item in enumerate(value) if type(item) is not int)
        raise InvalidRequestError(
            f"{name}[{index}] must be integer type, got {given(value[index])}.",
            field=name,
        )
    if min(value) < 0 or max(value) > MAX_TOKEN_ID:
        index = next(i for i, item in enumerate(value) if not 0 <= item <= MAX_TOKEN_ID)
        raise out_of_range(name, Bounds(0, MAX_TOKEN_ID), value[index], label=f"{name}[{index}]")
    return tuple(value)


def _stop(name: str, bounds: Bounds | None, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        items: list[object] = [value]
    elif isinstance(value, list):
        items = value
    else:
        raise wrong_type(name, Kind.STOP.value, value)
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"Parameter {name} must have at most {MAX_STOP_STRINGS} strings, got {len(items)}.", field=name
        )
    stops: list[str] = []
    for index, item in enumerate(items):
        label = name if item is value else f"{name}[{index}]"
        if not isinstance(item, str):
            raise InvalidRequestError(f"{label} must be string type, got {given(item)}.", field=name)
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"Parameter {label} must have 1 to {MAX_STOP_CHARS} characters, got {len(item)}.", field=name
            )
        _check_unicode(name, item)
        stops.append(item)
    return tuple(stops)


def _object(name: str, bounds: Bounds | None, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong_type(name, "object", value)
    return value


_CHECKS: Final[dict[Kind, Callable[[str, Bounds | None, object], Checked]]] = {
    Kind.BOOLEAN: _boolean,
    Kind.INTEGER: _whole("integer"),
    Kind.UNSIGNED: _whole("unsigned"),
    Kind.FLOAT: _float,
    Kind.STRING: _string,
    Kind.PROMPT: _prompt,
    Kind.TOKEN_IDS: _token_ids,
    Kind.STOP: _stop,
    Kind.OBJECT: _object,
}
