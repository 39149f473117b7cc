"""The MindIE native dialect: `POST /infer` and `POST /infer_token`.

Both URLs take `inputs` or `input_id`, as the open MindIE server does; the URL decides the shape of `token.id`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import orjson

from tengserve_adapter.protocols.call import FINISH_REASONS, Call, text_of
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.generation import Finish, TokenEvent
from tengserve_backend.generation.body import Body, generation_request, read_body, required
from tengserve_backend.generation.fields import Dialect


class Url(enum.Enum):
    """The two URLs, by the prompt field that each documents."""

    INFER = "inputs"
    INFER_TOKEN = "input_id"  # noqa: S105 - a field's name, not a secret


def parse(url: Url, body: Mapping[str, object], info: ModelInfo, *, max_text_chars: int, request_id: str) -> Call:
    """A body of one of the two URLs.

    Raises:
        InvalidRequestError: a field breaks its rule.
    """
    checked = read_body(Dialect.NATIVE, body, max_text_chars=max_text_chars)
    request = generation_request(checked, _prompt(url, body, checked), request_id=request_id, limits=info.limits)
    reply = NativeReply(
        id_in_list=url is Url.INFER_TOKEN,
        details=checked.values["details"],
        full_text=info.full_text_enabled,
    )
    return Call(request, checked.values["stream"], reply, checked.ignored)


def _prompt(url: Url, body: Mapping[str, object], checked: Body) -> str | tuple[int, ...]:
    text, ids = checked.values["inputs"], checked.values["input_id"]
    if text is not None and ids is not None:
        raise InvalidRequestError("Input conflict: give inputs or input_id, not both.", field="input_id")
    prompt = ids if text is None else text
    if prompt is None:
        raise required(next((name for name in ("inputs", "input_id") if name in body), url.value), body)
    return prompt


def _details(finish: Finish) -> dict[str, object]:
    return {
        "finish_reason": FINISH_REASONS[finish.reason],
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
    }


class NativeReply:
    """Answers as the samples of MindIE's native API, /infer and /infer_token, show them."""

    def __init__(self, *, id_in_list: bool, details: bool, full_text: bool) -> None:
        self._id_in_list = id_in_list
        self._details = details
        self._full_text = full_text
        self._texts: list[str] = []

    def event(self, event: TokenEvent) -> bytes:
        """The first event has prefill_time, the others decode_time; the last one the whole text and no token text."""
        latency = round(float(event.latency_ms), 3)
        first = not self._texts
        self._texts.append(event.text)
        data: dict[str, object] = {
            "prefill_time": latency if first else None,
            "decode_time": None if first else latency,
        }
        text: str | None
        if event.finish is None:
            text = "".join(self._texts) if self._full_text else event.text
        else:
            text = None
            data["generated_text"] = "".join(self._texts)
            data["details"] = _details(event.finish) if self._details else None
        data["token"] = {"id": [event.token_id] if self._id_in_list else event.token_id, "text": text}
        return orjson.dumps(data)

    def answer(self, events: Sequence[TokenEvent], finish: Finish) -> bytes:
        """`details` is there only when it was asked for."""
        data: dict[str, object] = {"generated_text": text_of(events)}
        if self._details:
            data["details"] = _details(finish)
        return orjson.dumps(data)
