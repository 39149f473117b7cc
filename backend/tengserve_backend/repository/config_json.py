"""ModelConfig as Triton prints it: what `/v2/models/M/config` answers and a user's model gets in `initialize`.

Names are snake_case, every primitive field is there with its default, and 64-bit integers are numbers. protobuf's own
JSON has neither: it prints them as strings, and clients that compute with `dims` break.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import descriptor, json_format

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.pbtxt import new_config

_FIRST_LINE_CHARS = 300


def config_json(config: Any) -> dict[str, Any]:
    """The JSON object of an inference.ModelConfig message."""
    return _message(config)


def normalized(config: Any, name: str) -> dict[str, Any]:
    """The same, with what Triton adds on load: the name, the version policy and the instance groups."""
    full = new_config()
    full.CopyFrom(config)
    full.name = name
    if full.version_policy.WhichOneof("policy_choice") is None:
        full.version_policy.latest.num_versions = 1
    elif full.version_policy.WhichOneof("policy_choice") == "latest":
        full.version_policy.latest.num_versions = max(1, full.version_policy.latest.num_versions)
    if not full.instance_group:
        full.instance_group.add()
    for index, group in enumerate(full.instance_group):
        group.name = group.name or f"{name}_{index}"
        group.count = max(1, group.count)
        if group.kind == group.KIND_AUTO:
            # Nothing here places instances on devices: a model chooses its own, and Triton calls that KIND_MODEL only
            # when it is asked for.
            group.kind = group.KIND_CPU
    return _message(full)


def parse_config_json(text: str, what: str) -> Any:
    """The message of a configuration in JSON, in snake_case or protobuf's own camelCase.

    Args:
        text: the JSON.
        what: names the text in errors, such as "the configuration of the request".

    Raises:
        ConfigurationError: it is no JSON object of the schema.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"{what} must be a JSON object, not {shown(given)}")
    return from_json(given, what)


def from_json(given: dict[str, Any], what: str) -> Any:
    """The message of a configuration that is a dict already; see `parse_config_json`."""
    try:
        return json_format.ParseDict(given, new_config())
    except (json_format.ParseError, TypeError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [""])[0][:_FIRST_LINE_CHARS]
        raise ConfigurationError(f"{what} breaks the schema of config.pbtxt: {line}") from None
    except SystemError:
        # What protobuf's own parser makes of the name of a field that is no text.
        raise ConfigurationError(f"{what} breaks the schema of config.pbtxt: a name has half a character") from None


def _message(message: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            out[field.name] = _repeated(field, getattr(message, field.name))
        elif field.message_type is not None or field.containing_oneof is not None:
            if message.HasField(field.name):
                out[field.name] = _value(field, getattr(message, field.name))
        else:
            out[field.name] = _value(field, getattr(message, field.name))
    return out


def _repeated(field: Any, values: Any) -> Any:
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return [_value(field, value) for value in values]
    value_field = entry.fields_by_name["value"]
    # JSON's keys are strings, also where the map's are numbers.
    return {str(key): _value(value_field, values[key]) for key in sorted(values)}


def _value(field: Any, value: Any) -> Any:
    if field.type == descriptor.FieldDescriptor.TYPE_MESSAGE:
        return _message(value)
    if field.type == descriptor.FieldDescriptor.TYPE_ENUM:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named is not None else value
    return value
