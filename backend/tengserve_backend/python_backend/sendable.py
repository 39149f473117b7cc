"""What of a model's response no protocol can carry, found before it is anybody else's failure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from tengserve_backend.errors import ErrorCode, ModelExecutionError, shown
from tengserve_backend.inference import InferResponse, ParameterValue

_MIN_INTEGER: Final = -(2**63)
_MAX_INTEGER: Final = 2**64 - 1
"""What 64 bits hold, with a sign or without: integers of gRPC, and of the JSON that clients read."""


def check_response(response: InferResponse, outputs: Collection[str]) -> None:
    """Check names and parameters; tensors are arrays of datatypes already.

    Args:
        response: of a model.
        outputs: names that its configuration has; none lets it answer with any.

    Raises:
        ModelExecutionError: there is something that cannot be sent; the sentence is for the client.
    """
    for tensor in response.outputs:
        if outputs and tensor.name not in outputs:
            # Text and code are Triton's.
            raise ModelExecutionError(
                f"unexpected inference output '{shown(tensor.name)}' for model '{response.model}'",
                code=ErrorCode.INVALID_ARG,
            )
        if not _is_text(tensor.name):
            raise _unsendable(response, f"the name of the output '{shown(tensor.name)}' is no text")
    _check_parameters(response, response.parameters)


def _check_parameters(response: InferResponse, parameters: Mapping[str, ParameterValue]) -> None:
    for name, value in parameters.items():
        what = f"parameter '{shown(name)}'"
        if not _is_text(name):
            raise _unsendable(response, f"the name of the {what} is no text")
        if isinstance(value, str):
            if not _is_text(value):
                raise _unsendable(response, f"{what} is no text")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _unsendable(response, f"{what} is not finite: {value}")
        elif not _MIN_INTEGER <= value <= _MAX_INTEGER:
            # The number itself may have more digits than Python prints.
            raise _unsendable(response, f"{what} must fit 64 bits, and takes {value.bit_length()}")


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsendable(response: InferResponse, problem: str) -> ModelExecutionError:
    return ModelExecutionError(f"The answer of model '{response.model}' cannot be sent: {problem}.")
