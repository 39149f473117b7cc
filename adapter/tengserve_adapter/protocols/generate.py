"""The v2 generate dialect: `POST /v2/models/{m}[/versions/{v}]/generate` and `/generate_stream`.

The URL decides whether the answer is a stream. Fields may be nested under `parameters`, as in MindIE's sample,
or flat, as in its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from tengserve_adapter.protocols.call import FINISH_REASONS, Call, text_of
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.generation import Finish, ModelLimits, TokenEvent
from tengserve_backend.generation.body import generation_request, read_body, required
from tengserve_backend.generation.fields import Dialect


def parse(
    body: Mapping[str, object],
    info: ModelInfo,
    *,
    model_name: str,
    stream: bool,
    max_text_chars: int,
    request_id: str,
) -> Call:
    """A body of one of the URLs.

    Args:
        body: the JSON object.
        info: the model.
        model_name: its name as the URL has it, for the answer.
        stream: whether the URL was generate_stream.
        max_text_chars: the operator's limit on text_input.
        request_id: used when the client gave none.

    Raises:
        InvalidRequestError: a field breaks its rule.
    """
    checked = read_body(Dialect.GENERATE, body, max_text_chars=max_text_chars)
    prompt = checked.values["text_input"]
    if prompt is None:
        raise required("text_input", body)
    request_id = checked.values["id"] or request_id
    request = generation_request(
        checked,
        prompt,
        request_id=request_id,
        limits=info.limits,
        max_prompt_tokens=max_prompt_tokens(info.limits),
    )
    reply = GenerateReply(
        request_id=request_id,
        model_name=model_name,
        details=checked.values["details"],
        full_text=info.full_text_enabled,
    )
    return Call(request, stream, reply, checked.ignored)


def max_prompt_tokens(limits: ModelLimits) -> int | None:
    """The document's limit, maxSeqLen - maxIterTimes; None, so the model's own alone, where that leaves nothing."""
    limit = limits.max_seq_len - limits.max_iter_times
    return limit if limit > 0 else None


class GenerateReply:
    """Answers as the samples of MindIE's v2 generate show them, with the seed added to `details`."""

    def __init__(self, *, request_id: str, model_name: str, details: bool, full_text: bool) -> None:
        self._head: dict[str, object] = {"id": request_id, "model_name": model_name, "model_version": None}
        self._details = details
        self._full_text = full_text
        self._text = ""
        self._tokens = 0

    def event(self, event: TokenEvent) -> bytes:
        """Every event carries its own text, the last one too; times and counts only with details."""
        return orjson.dumps(self.event_data(event))

    def answer(self, events: Sequence[TokenEvent], finish: Finish) -> bytes:
        """`details` is there only when it was asked for."""
        return orjson.dumps(self.answer_data(events, finish))

    def event_data(self, event: TokenEvent) -> dict[str, object]:
        """What `event` writes."""
        self._tokens += 1
        text = event.text
        if self._full_text:
            self._text += text
            text = self._text
        data = {**self._head, "text_output": text}
        if self._details:
            latency = round(float(event.latency_ms), 3)
            data["details"] = self._event_details(event.finish)
            data["prefill_time"] = latency if self._tokens == 1 else None
            data["decode_time"] = None if self._tokens == 1 else latency
        return data

    def _event_details(self, finish: Finish | None) -> dict[str, object]:
        if finish is not None:
            return _details(finish)
        return {"generated_tokens": self._tokens, "first_token_cost": None, "decode_cost": None}

    def answer_data(self, events: Sequence[TokenEvent], finish: Finish) -> dict[str, object]:
        """What `answer` writes."""
        data = {**self._head, "text_output": text_of(events)}
        if self._details:
            data["details"] = _details(finish)
        return data


def _details(finish: Finish) -> dict[str, object]:
    return {
        "finish_reason": FINISH_REASONS[finish.reason],
        "generated_tokens": finish.generated_tokens,
        "first_token_cost": None,
        "decode_cost": None,
        "seed": finish.seed,
    }
