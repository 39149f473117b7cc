"""KServe's v1 protocol for an LLM: `POST /v1/models/{m}:predict`, one text an instance.

An instance is a prompt, or an object with the fields of v2 generate; `parameters` beside `instances` holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from tengserve_adapter.protocols import generate, triton_llm
from tengserve_adapter.protocols.call import Call
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.generation.checks import given

MAX_INSTANCES: Final = 256


def parse(
    body: Mapping[str, object], info: ModelInfo, *, model_name: str, max_text_chars: int, request_id: str
) -> list[Call]:
    """One call an instance; arguments as generate.parse.

    Raises:
        InvalidRequestError: a field breaks its rule; the message begins with its instance.
    """
    instances = body.get("instances")
    if not isinstance(instances, list) or not 1 <= len(instances) <= MAX_INSTANCES:
        shown = f"an array of {len(instances)}" if isinstance(instances, list) else given(instances)
        raise InvalidRequestError(
            f"instances must be an array of 1 to {MAX_INSTANCES} elements, got {shown}.", field="instances"
        )
    shared = body.get("parameters")
    if shared is not None and not isinstance(shared, dict):
        raise InvalidRequestError(f"parameters must be an object, got {given(shared)}.", field="parameters")
    calls: list[Call] = []
    for index, instance in enumerate(instances):
        try:
            fields = _fields(instance, shared or {})
            parse_one = triton_llm.parse if triton_llm.is_triton(fields) else generate.parse
            call = parse_one(
                fields,
                info,
                model_name=model_name,
                stream=False,
                max_text_chars=max_text_chars,
                request_id=f"{request_id}-{index}",
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(f"instances[{index}]: {error.message}", field=error.field) from None
        calls.append(call)
    return calls


def _fields(instance: object, shared: Mapping[str, object]) -> dict[str, object]:
    if isinstance(instance, str):
        return {"text_input": instance, "parameters": shared}
    if not isinstance(instance, dict):
        raise InvalidRequestError(f"must be a string or an object, got {given(instance)}.", field="instances")
    own = instance.get("parameters")
    if own is not None and not isinstance(own, dict):
        raise InvalidRequestError(f"parameters must be an object, got {given(own)}.", field="parameters")
    # What an instance says for itself, at either place, wins over what is said for all.
    inherited = {name: value for name, value in shared.items() if name not in instance}
    return {**instance, "parameters": {**inherited, **(own or {})}}


def answer(texts: Sequence[str]) -> bytes:
    """The JSON of the answer."""
    return orjson.dumps({"predictions": texts})
