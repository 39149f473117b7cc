"""Request parameters of v2 infer: those with a meaning in the protocol, and those that are the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.checks import given
from tengserve_backend.generation.fields import UINT64_MAX
from tengserve_backend.inference import ParameterValue, SequenceFlags

MAX_PARAMETERS: Final = 1024
"""Parameters of one request; a bound, and no rule of the protocol."""


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """A request's parameters, sorted out; fields as in InferRequest.

    Attributes:
        binary_data_output: outputs that say nothing else come as binary data (HTTP).
    """

    parameters: Mapping[str, ParameterValue]
    priority: int = 0
    timeout_us: int = 0
    sequence: SequenceFlags = field(default_factory=SequenceFlags)
    binary_data_output: bool = False


_NONE: Final = RequestParameters(MappingProxyType({}))


def sort_out(given_parameters: Mapping[str, object]) -> RequestParameters:
    """The parameters of a request by meaning.

    Raises:
        InvalidRequestError: a value of the wrong type, or a reserved name.
    """
    if not given_parameters:
        return _NONE
    if len(given_parameters) > MAX_PARAMETERS:
        raise InvalidRequestError(f"a request has at most {MAX_PARAMETERS} parameters, got {len(given_parameters)}")
    rest = dict(given_parameters)
    correlation_id = rest.pop("sequence_id", 0)
    if not isinstance(correlation_id, str):
        correlation_id = _unsigned("sequence_id", correlation_id, "an unsigned integer or a string")
    return RequestParameters(
        priority=_unsigned("priority", rest.pop("priority", 0)),
        timeout_us=_unsigned("timeout", rest.pop("timeout", 0)),
        sequence=SequenceFlags(
            correlation_id,
            start=_boolean("sequence_start", rest.pop("sequence_start", False)),
            end=_boolean("sequence_end", rest.pop("sequence_end", False)),
        ),
        binary_data_output=_boolean("binary_data_output", rest.pop("binary_data_output", False)),
        parameters={name: model_parameter(name, value) for name, value in rest.items()},
    )


def model_parameter(name: str, value: object) -> ParameterValue:
    """A parameter that goes to the model.

    Raises:
        InvalidRequestError: its name is reserved, or its value neither string, number nor boolean.
    """
    if name.startswith("triton_"):
        raise InvalidRequestError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            field=name,
        )
    if name == "headers":
        raise InvalidRequestError("parameter 'headers' is reserved and should not be specified.", field=name)
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequestError(
            f"parameter '{shown(name)}' has invalid type. It should be either 'int', 'bool', or 'string'.", field=name
        )
    if isinstance(value, int) and not -(2**63) <= value <= UINT64_MAX:
        raise InvalidRequestError(f"parameter '{shown(name)}' must fit 64 bits, got {given(value)}.", field=name)
    return value


def _unsigned(name: str, value: object, rule: str = "an unsigned integer") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= UINT64_MAX:
        raise InvalidRequestError(f"parameter '{name}' must be {rule}, got {given(value)}.", field=name)
    return value


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"parameter '{name}' must be boolean, got {given(value)}.", field=name)
    return value
