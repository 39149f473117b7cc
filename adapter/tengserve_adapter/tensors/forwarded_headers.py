"""Headers of a request as parameters of a python model, for those that the operator names; none by default.

As in Triton the pattern is looked for anywhere in a header's name, in upper and lower case alike, and a forwarded
header wins over the request's own parameter of that name: it may come from a proxy that the operator trusts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tengserve_adapter.tensors.parameters import MAX_PARAMETERS
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.inference import InferRequest, TensorModel
from tengserve_backend.inference.llm import LlmTensorModel

MAX_NAME_CHARS: Final = 128
"""A longer name is never forwarded: how long a pattern looks at it is the pattern's affair."""

_CASE_MATTERS: Final = "(?-i)"
_RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)


class ForwardedHeaders:
    """Which headers are forwarded.

    Args:
        pattern: a regular expression of Python's; `(?-i)` in front of it makes case matter.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = _compiled(pattern)

    def added_to(self, request: InferRequest, model: TensorModel, headers: Iterable[tuple[str, str]]) -> InferRequest:
        """The request with the headers that are forwarded. An LLM gets none: it knows its parameters.

        Raises:
            InvalidRequestError: a header has a name with a meaning of its own, or there are too many.
        """
        if isinstance(model, LlmTensorModel):
            return request
        found = {
            name: value
            for name, value in headers
            if len(name) <= MAX_NAME_CHARS and self._pattern.search(name) is not None
        }
        for name in found:
            if name in _RESERVED or name.startswith("triton_"):
                raise InvalidRequestError(
                    f"Header '{shown(name)}' is reserved for Triton usage and cannot be forwarded.", field=shown(name)
                )
        parameters = {**request.parameters, **found}
        if len(parameters) > MAX_PARAMETERS:
            raise InvalidRequestError(
                f"a request has at most {MAX_PARAMETERS} parameters, got {len(parameters)} with its headers"
            )
        return replace(request, parameters=parameters)


def is_pattern(text: str) -> bool:
    """Whether it is one that ForwardedHeaders takes."""
    try:
        _compiled(text)
    except re.error:
        return False
    return True


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith(_CASE_MATTERS):
        return re.compile(pattern.removeprefix(_CASE_MATTERS))
    return re.compile(pattern, re.IGNORECASE)
