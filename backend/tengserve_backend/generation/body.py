"""From the fields of a body to one generation request, by the table: what every dialect shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypedDict, cast

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.checks import Checked, check_value
from tengserve_backend.generation.fields import Dialect, Field, Kind, Place, Rule, fields_of
from tengserve_backend.generation.limits import ModelLimits
from tengserve_backend.generation.request import GenerationRequest
from tengserve_backend.generation.sampling import SamplingParams

_MAX_IGNORED_NAMES: Final = 8
_SAMPLING_SWITCHES: Final = frozenset({"temperature", "top_k", "top_p"})
"""Given without do_sample, any of these turns sampling on (rule of the open MindIE server)."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Unknown fields of one body: how many, and the first few names, shortened, for a debug log."""

    count: int
    names: tuple[str, ...]


class Values(TypedDict):
    """Checked values by field name, defaults filled in; None is "not given, and no default"."""

    id: str | None
    inputs: str | None
    input_id: tuple[int, ...] | None
    text_input: str | None
    stream: bool
    temperature: float
    top_k: int | None
    top_p: float
    max_new_tokens: int
    do_sample: bool | None
    seed: int | None
    repetition_penalty: float
    details: bool
    priority: int
    timeout: int
    stop: tuple[str, ...] | None
    ignore_eos: bool
    skip_special_tokens: bool
    min_new_tokens: int
    presence_penalty: float
    frequency_penalty: float
    min_p: float


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of one body.

    Attributes:
        values: see Values.
        given: names of the fields that had a value.
        ignored: the unknown ones.
    """

    values: Values
    given: frozenset[str]
    ignored: Ignored


_FIELDS: Final = {
    dialect: tuple((field, rule) for field, rule in fields_of(dialect) if rule.place is not Place.INPUTS_ITEM)
    for dialect in Dialect
}
_DEFAULTS: Final = {
    dialect: {field.name: rule.default for field, rule in fields} for dialect, fields in _FIELDS.items()
}
_TOP_NAMES: Final = {
    dialect: frozenset(field.name for field, rule in fields if rule.place in (Place.TOP, Place.EITHER))
    for dialect, fields in _FIELDS.items()
}
_PARAMETER_NAMES: Final = {
    dialect: frozenset(field.name for field, rule in fields if rule.place in (Place.PARAMETERS, Place.EITHER))
    for dialect, fields in _FIELDS.items()
}


def read_body(dialect: Dialect, body: Mapping[str, object], *, max_text_chars: int) -> Body:
    """Check every field of a body, prompt first, the others in the table's order.

    Args:
        dialect: whose rules apply.
        body: the JSON object.
        max_text_chars: the operator's limit on prompt text, in place of the documented default.

    Raises:
        InvalidRequestError: the first field that breaks its rule.
    """
    nested = body.get("parameters")
    parameters: dict[str, object] = {}
    if isinstance(nested, dict):
        parameters = nested
    values: dict[str, object] = dict(_DEFAULTS[dialect])
    given: set[str] = set()
    for field, rule in _FIELDS[dialect]:
        value = _read(field, _with_text_limit(field, rule, max_text_chars), body, parameters)
        if value is not None:
            values[field.name] = value
            given.add(field.name)
    # The table decides the types; a test holds Values and the table together.
    return Body(cast(Values, values), frozenset(given), _ignored(dialect, body, parameters))


def _with_text_limit(field: Field, rule: Rule, max_text_chars: int) -> Rule:
    if field.kind is not Kind.PROMPT or rule.bounds is None or rule.bounds.high == max_text_chars:
        return rule
    return replace(rule, bounds=replace(rule.bounds, high=max_text_chars))


def _read(field: Field, rule: Rule, body: Mapping[str, object], parameters: Mapping[str, object]) -> Checked | None:
    top = body.get(field.name) if rule.place is not Place.PARAMETERS else None
    nested = parameters.get(field.name) if rule.place is not Place.TOP else None
    if top is None:
        return None if nested is None else check_value(field, rule, nested)
    value = check_value(field, rule, top)
    if nested is not None and check_value(field, rule, nested) != value:
        raise InvalidRequestError(
            f"Parameter {field.name} must have one value, got different ones at top level and under parameters.",
            field=field.name,
        )
    return value


def _ignored(dialect: Dialect, body: Mapping[str, object], parameters: Mapping[str, object]) -> Ignored:
    unknown = [
        *(body.keys() - _TOP_NAMES[dialect]),
        *(parameters.keys() - _PARAMETER_NAMES[dialect]),
    ]
    return Ignored(len(unknown), tuple(shown(name) for name in sorted(unknown)[:_MAX_IGNORED_NAMES]))


def required(name: str, body: Mapping[str, object]) -> InvalidRequestError:
    """The error for a required field that is missing or null."""
    problem = "must not be null" if name in body else "is required"
    return InvalidRequestError(f"Parameter {name} {problem}.", field=name)


def generation_request(
    body: Body,
    prompt: str | tuple[int, ...],
    *,
    request_id: str,
    limits: ModelLimits,
    max_prompt_tokens: int | None = None,
) -> GenerationRequest:
    """The engine's request for a checked body."""
    values = body.values
    do_sample = values["do_sample"]
    if do_sample is None:
        do_sample = not _SAMPLING_SWITCHES.isdisjoint(body.given)
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=SamplingParams(
            do_sample=do_sample,
            temperature=values["temperature"],
            top_k=values["top_k"],
            top_p=values["top_p"],
            min_p=values["min_p"],
            repetition_penalty=values["repetition_penalty"],
            presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            seed=values["seed"],
        ),
        max_new_tokens=values["max_new_tokens"],
        min_new_tokens=min(values["min_new_tokens"], values["max_new_tokens"], limits.max_iter_times),
        stop=values["stop"] or (),
        ignore_eos=values["ignore_eos"],
        skip_special_tokens=values["skip_special_tokens"],
        priority=values["priority"],
        timeout_s=float(values["timeout"]),
        max_prompt_tokens=max_prompt_tokens,
    )
