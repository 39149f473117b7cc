"""Model control in the v2 protocol over HTTP: bodies in, bodies out. Names and texts are Triton's."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tengserve_adapter.control import IndexRow, JsonObject, SettingValue
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.inference import ModelStatistics, TensorSpec

FILE = "file:"
"""What the parameter of a file begins with; its path follows."""


@dataclass(frozen=True, slots=True)
class LoadBody:
    """What a load request brings.

    Attributes:
        config: a configuration as JSON text, or None.
        files: path in the model's folder to content.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_index(body: Mapping[str, object]) -> bool:
    """Whether only ready models are asked for.

    Raises:
        InvalidRequestError: `ready` is no boolean.
    """
    return _boolean("ready", body.get("ready", False))


def parse_load(body: Mapping[str, object]) -> LoadBody:
    """The parameters of a load request.

    Raises:
        InvalidRequestError: a parameter that there is not, or one of a wrong type.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in _parameters(body).items():
        if name != "config" and not name.startswith(FILE):
            raise InvalidRequestError(
                f"unrecognized config parameter '{shown(name)}': a load takes config and {FILE}<path>",
                field=shown(name),
            )
        if not isinstance(value, str):
            raise InvalidRequestError(
                f"parameter '{shown(name)}' must be a string, got {shown(value)}", field=shown(name)
            )
        if name == "config":
            config = value
        else:
            files[name.removeprefix(FILE)] = _content(name, value)
    return LoadBody(config, files)


def parse_unload(body: Mapping[str, object]) -> bool:
    """Whether dependents are to be unloaded too. Unknown parameters are let be, as Triton does.

    Raises:
        InvalidRequestError: `unload_dependents` is no boolean.
    """
    return _boolean("unload_dependents", _parameters(body).get("unload_dependents", False))


def parse_trace(body: Mapping[str, object]) -> dict[str, Sequence[str] | None]:
    """Changes of trace settings: a list of strings each, None clears.

    Raises:
        InvalidRequestError: a value is neither null, nor a string, nor a list of strings.
    """
    changes: dict[str, Sequence[str] | None] = {}
    for name, value in body.items():
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(one, str) for one in values):
            changes[name] = values
        elif value is None:
            changes[name] = None
        else:
            raise InvalidRequestError(
                f"trace setting '{shown(name)}' must be null, a string or a list of strings, got {shown(value)}",
                field=shown(name),
            )
    return changes


def parse_log(body: Mapping[str, object]) -> dict[str, SettingValue]:
    """Changes of log settings.

    Raises:
        InvalidRequestError: a value is neither a boolean, nor a whole number, nor a string.
    """
    changes: dict[str, SettingValue] = {}
    for name, value in body.items():
        if not isinstance(value, bool | int | str):
            raise InvalidRequestError(
                f"log setting '{shown(name)}' must be a boolean, a whole number or a string, got {shown(value)}",
                field=shown(name),
            )
        changes[name] = value
    return changes


def index_json(rows: Sequence[IndexRow]) -> list[dict[str, str]]:
    """The repository index: what is not known of a model is left out."""
    return [{name: value for name, value in asdict(row).items() if value or name == "name"} for row in rows]


def trace_json(settings: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Trace settings: strings, but for the list of levels."""
    return {name: list(values) if name == "trace_level" else ",".join(values) for name, values in settings.items()}


def statistics_json(name: str, version: str, statistics: ModelStatistics) -> JsonObject:
    """One ModelStatistics; durations are nanoseconds, last_inference is milliseconds since 1970."""
    return {
        "name": name,
        "version": version,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            # There is no cache of responses.
            "cache_hit": _duration((0, 0)),
            "cache_miss": _duration((0, 0)),
        },
        "response_stats": {
            str(index): {
                "compute_infer": _duration(response.compute_infer),
                "compute_output": _duration(response.compute_output),
                "success": _duration(response.success),
                "fail": _duration(response.fail),
                "empty_response": _duration(response.empty_response),
                "cancel": _duration(response.cancel),
            }
            for index, response in enumerate(statistics.responses)
        },
        "batch_stats": [
            {
                "batch_size": batch.batch_size,
                "compute_input": _duration((batch.count, batch.compute_input_ns)),
                "compute_infer": _duration((batch.count, batch.compute_infer_ns)),
                "compute_output": _duration((batch.count, batch.compute_output_ns)),
            }
            for batch in statistics.batches
        ],
        # Of memory that a backend tells of; none here does.
        "memory_usage": [],
    }


def _duration(pair: tuple[int, int]) -> dict[str, int]:
    return {"count": pair[0], "ns": pair[1]}


def tensors_config(specs: Sequence[TensorSpec], *, inputs: bool) -> list[dict[str, object]]:
    """Specs as `input` or `output` of a ModelConfig, for a model whose config.pbtxt names none."""
    rows: list[dict[str, object]] = []
    for spec in specs:
        row: dict[str, object] = {
            "name": spec.name,
            "data_type": spec.datatype.config_name,
            "dims": list(spec.shape),
        }
        rows.append({**row, "optional": spec.optional} if inputs else row)
    return rows


def _parameters(body: Mapping[str, object]) -> Mapping[str, object]:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"'parameters' must be an object, got {shown(parameters)}", field="parameters")
    return parameters


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"'{name}' must be true or false, got {shown(value)}", field=name)
    return value


def _content(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"parameter '{shown(name)}' must be base64", field=shown(name)) from None
