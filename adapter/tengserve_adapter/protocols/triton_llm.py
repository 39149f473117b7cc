"""Generate as clients of Triton's vLLM and TensorRT-LLM backends use it: their fields on the same URL.

A body is theirs when it has a field that MindIE does not know, or its prompt as an array of one. What they share with
MindIE keeps its meaning, `details` included; the URL decides whether the answer is a stream, not `stream`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tengserve_adapter.protocols.call import Call
from tengserve_adapter.protocols.generate import GenerateReply, max_prompt_tokens
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.generation import Finish, TokenEvent, triton
from tengserve_backend.generation.body import read_body, required
from tengserve_backend.generation.fields import Dialect
from tengserve_backend.inference.llm import FINISH_REASONS, logprobs_json


def is_triton(body: Mapping[str, object]) -> bool:
    """Whether a body is of a client of these backends."""
    prompt = body.get("text_input")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return True
    return not triton.NAMES.isdisjoint(body) or not triton.NAMES.isdisjoint(_nested(body))


def _nested(body: Mapping[str, object]) -> Mapping[str, object]:
    nested = body.get("parameters")
    return nested if isinstance(nested, dict) else {}


def parse(
    body: Mapping[str, object],
    info: ModelInfo,
    *,
    model_name: str,
    stream: bool,
    max_text_chars: int,
    request_id: str,
) -> Call:
    """A body for which is_triton holds; arguments and errors as generate.parse."""
    values = _values(body)
    rest = {name: value for name, value in body.items() if not triton.knows(name)}
    prompt = rest.get("text_input")
    if isinstance(prompt, list) and len(prompt) == 1:
        rest["text_input"] = prompt[0]
    if "parameters" in rest and isinstance(rest["parameters"], dict):
        rest["parameters"] = {name: value for name, value in rest["parameters"].items() if not triton.knows(name)}
    checked = read_body(Dialect.GENERATE, rest, max_text_chars=max_text_chars)
    text = checked.values["text_input"]
    if text is None:
        raise required("text_input", body)
    request_id = checked.values["id"] or request_id
    request, options = triton.read(values, text, request_id=request_id, limits=info.limits)
    # The URL says what streams; without a word about it the prompt is not repeated, as MindIE's clients expect.
    options = replace(options, stream=stream, exclude_input=options.exclude_input is not False)
    echo = text if options.echoes() else ""
    reply = TritonReply(
        request_id=request_id,
        model_name=model_name,
        details=checked.values["details"],
        full_text=info.full_text_enabled,
        options=options,
        echo=echo,
    )
    request = replace(request, max_prompt_tokens=max_prompt_tokens(info.limits))
    return Call(request, stream, reply, checked.ignored)


def _values(body: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for source in (body, _nested(body)):
        for name, value in source.items():
            if not triton.knows(name) or value is None:
                continue
            if values.setdefault(name, value) != value:
                raise InvalidRequestError(
                    f"Parameter {name} must have one value, got different ones at top level and under parameters.",
                    field=name,
                )
    return values


class TritonReply(GenerateReply):
    """The answers of generate, with the outputs of the vLLM backend beside them."""

    def __init__(
        self,
        *,
        request_id: str,
        model_name: str,
        details: bool,
        full_text: bool,
        options: triton.TritonOptions,
        echo: str,
    ) -> None:
        super().__init__(request_id=request_id, model_name=model_name, details=details, full_text=full_text)
        self._options: Final = options
        self._echo: Final = echo
        self._cumulative = 0.0

    def event_data(self, event: TokenEvent) -> dict[str, object]:
        """Counts of tokens are those of the event; `num_input_tokens` comes with the last one."""
        return super().event_data(event) | self._outputs([event], event.finish)

    def answer_data(self, events: Sequence[TokenEvent], finish: Finish) -> dict[str, object]:
        """The prompt comes first when the client asked for it."""
        data = super().answer_data(events, finish)
        data["text_output"] = f"{self._echo}{data['text_output']}"
        return data | self._outputs(events, finish)

    def _outputs(self, events: Sequence[TokenEvent], finish: Finish | None) -> dict[str, object]:
        self._cumulative += sum(event.logprobs.logprob for event in events if event.logprobs is not None)
        options = self._options
        outputs: dict[str, object] = {}
        if options.finish_reason:
            outputs["finish_reason"] = "None" if finish is None else FINISH_REASONS[finish.reason]
        if options.cumulative_logprob:
            outputs["cumulative_logprob"] = self._cumulative
        if options.logprobs:
            outputs["logprobs"] = logprobs_json(events)
        if options.num_input_tokens and finish is not None:
            outputs["num_input_tokens"] = finish.prompt_tokens
        if options.num_output_tokens:
            outputs["num_output_tokens"] = len(events)
        return outputs
