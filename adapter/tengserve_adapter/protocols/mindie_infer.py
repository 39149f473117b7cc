"""MindIE's token infer, on the URL of v2 infer: `POST /v2/models/{m}[/versions/{v}]/infer`, token ids in and out.

One UINT32 input with the sampling parameters in its own `parameters`, and exactly one output, which must be named. A
tensor that an LLM has by name is not MindIE's, whatever its datatype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from tengserve_adapter.protocols.generate import max_prompt_tokens
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.generation.body import Ignored, generation_request, read_body
from tengserve_backend.generation.checks import MAX_TOKEN_ID, given
from tengserve_backend.generation.fields import Dialect
from tengserve_backend.generation.limits import MAX_PROMPT_TOKENS

_DATATYPE = "UINT32"
_MAX_NAME_CHARS = 256
_OWN_NAMES = frozenset({"input_ids"})


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A parsed body.

    Attributes:
        request: for the engine.
        output: name of the output in the answer.
        ignored: parameters that nobody knows.
    """

    request: GenerationRequest
    output: str
    ignored: Ignored

    def answer(self, token_ids: Sequence[int]) -> bytes:
        """The JSON of the answer; it names no model."""
        output = {"name": self.output, "shape": [1, len(token_ids)], "datatype": _DATATYPE, "data": token_ids}
        return orjson.dumps({"id": self.request.request_id, "outputs": [output]})


def is_token_infer(head: Mapping[str, object]) -> bool:
    """Whether a body for an LLM is MindIE's: its first input is UINT32, in JSON, and no tensor of Triton's LLMs."""
    inputs = head.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    return (
        isinstance(first, dict)
        and first.get("datatype") == _DATATYPE
        and "data" in first
        and first.get("name") not in _OWN_NAMES
    )


def parse(head: Mapping[str, object], info: ModelInfo, *, request_id: str) -> TokenCall:
    """A body for which is_token_infer holds.

    Args:
        head: the JSON object.
        info: the model.
        request_id: used when the client gave none.

    Raises:
        InvalidRequestError: a field breaks its rule.
    """
    item = _input(head)
    name = item.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME_CHARS:
        raise _wrong("inputs[0].name", f"a string of 1 to {_MAX_NAME_CHARS} characters", name)
    length = _length(item.get("shape"))
    token_ids = _token_ids(item.get("data"), length)
    body = {"id": head.get("id"), "parameters": item.get("parameters")}
    checked = read_body(Dialect.GENERATE, body, max_text_chars=1)
    output = _output(head.get("outputs"))
    request = generation_request(
        checked,
        token_ids,
        request_id=checked.values["id"] or request_id,
        limits=info.limits,
        max_prompt_tokens=max_prompt_tokens(info.limits),
    )
    return TokenCall(request, output, checked.ignored)


def _input(head: Mapping[str, object]) -> Mapping[str, object]:
    inputs = head.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise _wrong("inputs", "an array of one object", inputs)
    return inputs[0]


def _length(shape: object) -> int:
    if (
        not isinstance(shape, list)
        or any(type(size) is not int for size in shape)
        or len(shape) not in (1, 2)
        or (len(shape) == 2 and shape[0] != 1)
        or not 0 < shape[-1] <= MAX_PROMPT_TOKENS
    ):
        raise InvalidRequestError(
            f"inputs[0].shape must be [n] or [1, n] with n in (0, {MAX_PROMPT_TOKENS}], got {shown(shape)}.",
            field="inputs",
        )
    length: int = shape[-1]
    return length


def _token_ids(data: object, length: int) -> tuple[int, ...]:
    if not isinstance(data, list):
        raise _wrong("inputs[0].data", "an array of integers", data)
    if len(data) != length:
        raise InvalidRequestError(
            f"inputs[0].data must have {length} elements, as its shape says, got {len(data)}.", field="inputs"
        )
    for index, item in enumerate(data):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise _wrong(f"inputs[0].data[{index}]", f"an integer in [0, {MAX_TOKEN_ID}]", item)
    return tuple(data)


def _output(outputs: object) -> str:
    if not isinstance(outputs, list) or len(outputs) != 1 or not isinstance(outputs[0], dict):
        raise _wrong("outputs", "an array of one object", outputs)
    name = outputs[0].get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME_CHARS:
        raise _wrong("outputs[0].name", f"a string of 1 to {_MAX_NAME_CHARS} characters", name)
    return name


def _wrong(field: str, rule: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{field} must be {rule}, got {given(value)}.", field=field.partition("[")[0])
