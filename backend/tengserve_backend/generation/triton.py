"""What clients of Triton's LLM backends say, as fields of the one table: other names, and values in other clothes.

The vLLM backend takes sampling parameters as request parameters or as a JSON text, numbers also as strings; the
TensorRT-LLM backend takes each as a tensor of one element, so that over HTTP an array of one stands for its element.
Every bound is that of the table's row; what the two backends allow beyond it is said in `_translated`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.generation.body import Body, generation_request, read_body
from tengserve_backend.generation.checks import check_value, given, out_of_range, wrong_type
from tengserve_backend.generation.fields import Bounds, Dialect, Field, Kind, Place, Rule, fields_of
from tengserve_backend.generation.limits import ModelLimits
from tengserve_backend.generation.request import MAX_LOGPROBS, GenerationRequest

VLLM: Final = "vLLM backend"
TRTLLM: Final = "TensorRT-LLM backend"

MAX_SAMPLING_JSON_CHARS: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class TritonField:
    """A field that only Triton's LLM backends have.

    Attributes:
        name, kind: its key and what it takes.
        source: the backend.
        description: one line.
        stands_for: the field of the table that this is another name of; its rule applies.
        bounds: of the value, when it stands for no other field.
        only: the one value that is served; None takes any.
    """

    name: str
    kind: Kind
    source: str
    description: str
    stands_for: str = ""
    bounds: Bounds | None = None
    only: bool | int | None = None


FIELDS: Final[tuple[TritonField, ...]] = (
    TritonField(
        "stream", Kind.BOOLEAN, VLLM, "One response a token (v2 infer on a gRPC stream); generate has two URLs."
    ),
    TritonField(
        "sampling_parameters", Kind.STRING, VLLM, "A JSON object with more of these fields; it wins over them."
    ),
    TritonField(
        "exclude_input_in_output", Kind.BOOLEAN, VLLM, "false: the prompt comes before the text of the answer."
    ),
    TritonField("return_finish_reason", Kind.BOOLEAN, VLLM, "Answer with `finish_reason`: `stop` or `length`."),
    TritonField("return_cumulative_logprob", Kind.BOOLEAN, VLLM, "Answer with `cumulative_logprob`."),
    TritonField("return_logprobs", Kind.BOOLEAN, VLLM, "Answer with `logprobs`, a JSON text."),
    TritonField("return_num_input_tokens", Kind.BOOLEAN, VLLM, "Answer with `num_input_tokens`."),
    TritonField("return_num_output_tokens", Kind.BOOLEAN, VLLM, "Answer with `num_output_tokens`."),
    TritonField("max_tokens", Kind.INTEGER, VLLM, "Most tokens to generate.", "max_new_tokens"),
    TritonField("min_tokens", Kind.INTEGER, VLLM, "Fewest tokens to generate.", "min_new_tokens"),
    TritonField("logprobs", Kind.INTEGER, VLLM, "Alternatives a token in `logprobs`.", bounds=Bounds(0, MAX_LOGPROBS)),
    TritonField("n", Kind.INTEGER, VLLM, "Answers a prompt.", only=1),
    TritonField("best_of", Kind.INTEGER, VLLM, "Answers to choose from.", only=1),
    TritonField("min_length", Kind.INTEGER, TRTLLM, "Fewest tokens to generate.", "min_new_tokens"),
    TritonField("random_seed", Kind.UNSIGNED, TRTLLM, "Makes sampling repeatable.", "seed"),
    TritonField("stop_words", Kind.STOP, TRTLLM, "Text that ends the answer; empty strings are none.", "stop"),
    TritonField("bad_words", Kind.STOP, TRTLLM, "Not served: must be empty."),
    TritonField("beam_width", Kind.INTEGER, TRTLLM, "Beams of a beam search.", only=1),
    TritonField("length_penalty", Kind.FLOAT, TRTLLM, "Of a beam search: checked, and without effect."),
    TritonField(
        "end_id", Kind.INTEGER, TRTLLM, "Checked, and without effect: the model's own end tokens end an answer."
    ),
    TritonField("pad_id", Kind.INTEGER, TRTLLM, "Checked, and without effect: nothing is padded."),
    TritonField("return_log_probs", Kind.BOOLEAN, TRTLLM, "As `return_cumulative_logprob` and `return_logprobs`."),
    TritonField("return_context_logits", Kind.BOOLEAN, TRTLLM, "Logits of the prompt.", only=False),
    TritonField("return_generation_logits", Kind.BOOLEAN, TRTLLM, "Logits of the answer.", only=False),
)
"""The table of what the other table does not have."""

_BY_NAME: Final = {field.name: field for field in FIELDS}
_SHARED: Final = {
    field.name: (field, rule)
    for field, rule in fields_of(Dialect.GENERATE)
    if rule.place is Place.EITHER and field.name not in ("details", "batch_size")
}
NAMES: Final = frozenset(_BY_NAME)
"""Fields that only these backends have: one of them in a body of generate says whose client it is."""


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """What an answer is to hold; as in the vLLM backend.

    Attributes:
        stream: one response a token.
        exclude_input: the prompt is not repeated; None when the request does not say.
        finish_reason, cumulative_logprob, logprobs, num_input_tokens, num_output_tokens: outputs that are asked for.
    """

    stream: bool = False
    exclude_input: bool | None = None
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False

    def echoes(self) -> bool:
        """Whether the vLLM backend would repeat the prompt: only when it does not stream, and unless it is told not to.

        Raises:
            InvalidRequestError: a stream cannot.
        """
        if self.stream and self.exclude_input is False:
            raise InvalidRequestError(
                "When streaming, `exclude_input_in_output` = False is not allowed.", field="exclude_input_in_output"
            )
        return not self.stream and not self.exclude_input


def knows(name: str) -> bool:
    """Whether this is a field of Triton's LLM backends, or one that they share with generate."""
    return name in _BY_NAME or name in _SHARED


def kinds() -> dict[str, Kind]:
    """Every field's kind, those of the other table included."""
    own = {field.name: field.kind for field in FIELDS}
    return own | {name: field.kind for name, (field, _) in _SHARED.items() if name not in ("priority", "timeout")}


def read(
    values: Mapping[str, object], prompt: str | tuple[int, ...], *, request_id: str, limits: ModelLimits
) -> tuple[GenerationRequest, TritonOptions]:
    """The request of a client of these backends; names that nobody knows are not looked at (see `knows`).

    Args:
        values: by name, as JSON has them.
        prompt: what to continue.
        request_id, limits: for the engine's request.

    Raises:
        InvalidRequestError: a field breaks its rule.
    """
    merged = {name: _bare(name, value) for name, value in values.items() if value is not None and knows(name)}
    text = merged.pop("sampling_parameters", None)
    if text is not None:
        merged.update(_sampling_json(text))
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    for name, value in merged.items():
        field = _BY_NAME.get(name)
        if field is None or field.stands_for:
            _add(shared, field.stands_for if field else name, name, value)
        else:
            own[name] = _own(field, value)
    options = _options(own)
    request = generation_request(_translated(shared), prompt, request_id=request_id, limits=limits)
    if _is_special("seed", shared.get("seed")):
        request = replace(request, sampling=replace(request.sampling, seed=0))
    return replace(request, logprobs=_logprobs(own, options)), options


def _bare(name: str, value: object) -> object:
    """The value, out of the array of one that stands for it."""
    takes_list = _kind(name) is Kind.STOP
    return value[0] if isinstance(value, list) and len(value) == 1 and not takes_list else value


def _kind(name: str) -> Kind:
    field = _BY_NAME.get(name)
    return field.kind if field is not None else _SHARED[name][0].kind


def _sampling_json(text: object) -> dict[str, object]:
    name = "sampling_parameters"
    if not isinstance(text, str):
        raise wrong_type(name, "string", text)
    if len(text) > MAX_SAMPLING_JSON_CHARS:
        raise out_of_range(name, f"at most {MAX_SAMPLING_JSON_CHARS} characters", text)
    try:
        parsed = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise out_of_range(name, "a JSON object", text) from None
    if not isinstance(parsed, dict):
        raise out_of_range(name, "a JSON object", text)
    for key in parsed:
        if not knows(key) or key == name:
            raise InvalidRequestError(f"{name} has a field that is not known here: {shown(key)}.", field=name)
    return {key: _bare(key, value) for key, value in parsed.items() if value is not None}


def _add(shared: dict[str, object], canonical: str, name: str, value: object) -> None:
    field, rule = _SHARED[canonical]
    value = _typed(field.kind, value)
    if field.kind is Kind.STOP:
        value = _without_empty(value)
    if not _is_special(canonical, value):
        check_value(replace(field, name=name), rule, value)
    if shared.setdefault(canonical, value) != value:
        raise InvalidRequestError(
            f"Parameter {canonical} must have one value, got different ones under its several names.", field=name
        )


def _typed(kind: Kind, value: object) -> object:
    """A number or boolean that was sent as text; anything else as it is, for the check to judge."""
    if not isinstance(value, str):
        return value
    try:
        if kind in (Kind.INTEGER, Kind.UNSIGNED):
            return int(value)
        if kind is Kind.FLOAT:
            return float(value)
    except ValueError:
        return value
    return {"true": True, "false": False}.get(value.lower(), value) if kind is Kind.BOOLEAN else value


def _without_empty(value: object) -> object:
    if isinstance(value, str):
        return [value] if value else []
    return [item for item in value if item != ""] if isinstance(value, list) else value


def _is_special(canonical: str, value: object) -> bool:
    """Values that these backends give a meaning, and the table's rule forbids."""
    if isinstance(value, bool):
        return False
    return (canonical == "temperature" and value == 0) or (
        (canonical == "top_k" and value == -1) or (canonical == "seed" and value == 0)
    )


def _translated(shared: Mapping[str, object]) -> Body:
    """The fields as generate has them: temperature 0 is greedy, top_k -1 is the whole vocabulary, seed 0 is a seed."""
    parameters = {name: value for name, value in shared.items() if not _is_special(name, value)}
    if _is_special("temperature", shared.get("temperature")):
        parameters["do_sample"] = False
    if _is_special("top_k", shared.get("top_k")):
        parameters["top_k"] = 0
    return read_body(Dialect.GENERATE, {"parameters": parameters}, max_text_chars=1)


def _own(field: TritonField, value: object) -> object:
    value = _typed(field.kind, value)
    if field.name == "bad_words":
        if _without_empty(value) != []:
            raise out_of_range(field.name, "empty, because it is not served", value)
        return value
    check_value(Field(field.name, field.kind, field.description), Rule(field.source, Place.EITHER, field.bounds), value)
    if field.only is not None and value != field.only:
        raise out_of_range(field.name, f"{given(field.only)}, because nothing else is served", value)
    return value


def _options(own: Mapping[str, object]) -> TritonOptions:
    both = bool(own.get("return_log_probs"))
    exclude = own.get("exclude_input_in_output")
    return TritonOptions(
        stream=bool(own.get("stream")),
        exclude_input=exclude if isinstance(exclude, bool) else None,
        finish_reason=bool(own.get("return_finish_reason")),
        cumulative_logprob=both or bool(own.get("return_cumulative_logprob")),
        logprobs=both or bool(own.get("return_logprobs")),
        num_input_tokens=bool(own.get("return_num_input_tokens")),
        num_output_tokens=bool(own.get("return_num_output_tokens")),
    )


def _logprobs(own: Mapping[str, object], options: TritonOptions) -> int | None:
    asked = own.get("logprobs")
    if isinstance(asked, int):
        return asked
    return 0 if options.cumulative_logprob or options.logprobs else None
