"""Every request field of every generation endpoint: the one table that parser, error texts, docs and tests come from.

`native` is `POST /infer` and `POST /infer_token` (one set of rules), `generate` is `POST /v2/models/{m}/generate` and
`/generate_stream`. A row cites the API document that gives its rule; "extension" marks what no document has and real
clients send. No field has an alias. `null` counts as absent everywhere but in a required field.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from tengserve_backend.generation.limits import MAX_PROMPT_TOKENS
from tengserve_backend.generation.request import DEFAULT_MAX_NEW_TOKENS, DEFAULT_TIMEOUT_S, LOWEST_PRIORITY

INT32_MAX: Final = 2147483647
UINT64_MAX: Final = 18446744073709551615
FLOAT32_MAX: Final = 3.4028234663852886e38
"""The documents' `float` is 32 bits wide; a larger number would be infinity where it is used."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256

INFER_DOC: Final = "MindIE native API, /infer"
INFER_TOKEN_DOC: Final = "MindIE native API, /infer_token"  # noqa: S105 - a document's name, not a secret
NATIVE_DOCS: Final = "MindIE native API"
GENERATE_DOC: Final = "MindIE v2 generate"
EXTENSION: Final = "extension"


class Dialect(enum.Enum):
    """Endpoints that share their field rules."""

    NATIVE = "native"
    GENERATE = "generate"


class Kind(enum.Enum):
    """What JSON a field takes. The value is the word used in error texts and in the docs."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    STRING = "string"
    PROMPT = "text"
    TOKEN_IDS = "array of integers"  # noqa: S105 - token ids, not a secret
    STOP = "string or array of strings"
    OBJECT = "object"


class Place(enum.Enum):
    """Where a field sits in the body."""

    TOP = "top level"
    PARAMETERS = "`parameters`"
    EITHER = "`parameters` or top level"
    INPUTS_ITEM = "item of an `inputs` list"


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of numbers, or of the length of a string or array.

    Attributes:
        low, high: ends; `high` None is no upper end.
        low_open, high_open: the end itself is refused.
    """

    low: int | float
    high: int | float | None = None
    low_open: bool = False
    high_open: bool = False

    def admits(self, value: int | float) -> bool:
        """Whether the value lies inside; NaN never does."""
        if not (value > self.low if self.low_open else value >= self.low):
            return False
        return self.high is None or (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        """The rule as it follows "must be": "in [1, 5]", "greater than 0"."""
        if self.high is None:
            return f"{'greater than' if self.low_open else 'at least'} {_number(self.low)}"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{_number(self.low)}, {_number(self.high)}{right}"


def _number(value: int | float) -> str:
    """Shortest exact text, with exponents as the API documents write them (1e-6)."""
    return repr(value).replace("e-0", "e-").replace("e+", "e")


@dataclass(frozen=True, slots=True)
class Rule:
    """What one dialect says about a field.

    Attributes:
        source: the document that gives the rule.
        place: where the field sits.
        bounds: of the value; of the length for strings and arrays; None when any value of the kind is right.
        default: the value when the field is absent; None when there is none.
        default_note: what happens without a value, when that is not just `default`.
        required: absent is an error (inputs and input_id: one of the two).
    """

    source: str
    place: Place
    bounds: Bounds | None = None
    default: bool | int | float | None = None
    default_note: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One request field.

    Attributes:
        name: its key.
        kind: what JSON it takes.
        description: one line.
        effect: what the server does with it, where that is not what the description says.
        native, generate: its rule in each dialect, None where the dialect does not know it.
    """

    name: str
    kind: Kind
    description: str
    effect: str = ""
    native: Rule | None = None
    generate: Rule | None = None

    def rule(self, dialect: Dialect) -> Rule | None:
        """The rule in this dialect."""
        return self.native if dialect is Dialect.NATIVE else self.generate


def _both(
    bounds: Bounds | None = None,
    default: bool | int | float | None = None,
    note: str = "",
    *,
    native: str = NATIVE_DOCS,
    generate: str = GENERATE_DOC,
) -> tuple[Rule, Rule]:
    return (
        Rule(native, Place.PARAMETERS, bounds, default, note),
        Rule(generate, Place.EITHER, bounds, default, note),
    )


def _field(name: str, kind: Kind, rules: tuple[Rule, Rule], description: str, effect: str = "") -> Field:
    return Field(name, kind, description, effect, native=rules[0], generate=rules[1])


def _media(name: str, description: str) -> Field:
    rule = Rule(INFER_DOC, Place.INPUTS_ITEM)
    return Field(name, Kind.STRING, description, "Not served yet: an `inputs` list is refused with 422.", native=rule)


FIELDS: Final[tuple[Field, ...]] = (
    Field(
        "id",
        Kind.STRING,
        "The client's name for the request, repeated in the answer.",
        "Printable characters only, because it is written to logs.",
        generate=Rule(GENERATE_DOC, Place.TOP, Bounds(1, 256), default_note="drawn at random"),
    ),
    Field(
        "inputs",
        Kind.PROMPT,
        "Prompt text.",
        "Tokenized as it is, without a chat template. Exactly one of `inputs` and `input_id`, on either URL.",
        native=Rule(INFER_DOC, Place.TOP, Bounds(1, 4194304), required=True),
    ),
    Field(
        "input_id",
        Kind.TOKEN_IDS,
        "Prompt as token ids, each in [0, 1048576] and inside the model's vocabulary.",
        "Used as given, nothing is added. Exactly one of `inputs` and `input_id`, on either URL.",
        native=Rule(INFER_TOKEN_DOC, Place.TOP, Bounds(1, MAX_PROMPT_TOKENS), required=True),
    ),
    Field(
        "text_input",
        Kind.PROMPT,
        "Prompt text.",
        "Tokenized as it is, without a chat template; at most maxSeqLen - maxIterTimes tokens when that is positive.",
        generate=Rule(GENERATE_DOC, Place.TOP, Bounds(1, 16000), required=True),
    ),
    _media("type", "Kind of a multimodal item: text, image_url, video_url, audio_url."),
    _media("text", "Text of a multimodal item."),
    _media("image_url", "Image of a multimodal item."),
    _media("video_url", "Video of a multimodal item."),
    _media("audio_url", "Audio of a multimodal item."),
    Field(
        "stream",
        Kind.BOOLEAN,
        "true: one server-sent event a token; false: one JSON answer.",
        "v2 has two URLs instead, and ignores the field.",
        native=Rule(NATIVE_DOCS, Place.TOP, default=False),
    ),
    Field(
        "parameters",
        Kind.OBJECT,
        "Holds the fields below.",
        native=Rule(NATIVE_DOCS, Place.TOP),
        generate=Rule(GENERATE_DOC, Place.TOP),
    ),
    Field(
        "temperature",
        Kind.FLOAT,
        "Divides the logits: higher is more random.",
        native=Rule(NATIVE_DOCS, Place.PARAMETERS, Bounds(1e-6, FLOAT32_MAX, low_open=True), 1.0),
        generate=Rule(GENERATE_DOC, Place.EITHER, Bounds(0, FLOAT32_MAX, low_open=True), 1.0),
    ),
    Field(
        "top_k",
        Kind.UNSIGNED,
        "Sample from the k most probable tokens.",
        "At or above the vocabulary size it means the whole vocabulary. On v2, 0 does too.",
        native=Rule(NATIVE_DOCS, Place.PARAMETERS, Bounds(1, INT32_MAX), default_note="the model's own"),
        generate=Rule(GENERATE_DOC, Place.EITHER, Bounds(0, INT32_MAX), 0),
    ),
    Field(
        "top_p",
        Kind.FLOAT,
        "Sample from the smallest set of tokens whose probability reaches this.",
        "On /infer and /infer_token 1.0 is refused: leave it out instead.",
        native=Rule(NATIVE_DOCS, Place.PARAMETERS, Bounds(1e-6, 1.0, low_open=True, high_open=True), 1.0),
        generate=Rule(GENERATE_DOC, Place.EITHER, Bounds(0, 1.0, low_open=True), 1.0),
    ),
    _field(
        "max_new_tokens",
        Kind.INTEGER,
        _both(Bounds(1, INT32_MAX), DEFAULT_MAX_NEW_TOKENS),
        "Most tokens to generate.",
        "Lowered silently to maxIterTimes and to the room left in maxSeqLen and in the positions of the model.",
    ),
    _field(
        "do_sample",
        Kind.BOOLEAN,
        _both(note="on when temperature, top_k or top_p is given, else off"),
        "true: sample; false: take the most probable token.",
    ),
    _field(
        "seed",
        Kind.UNSIGNED,
        _both(Bounds(1, UINT64_MAX), note="drawn at random, and shown in `details`"),
        "Makes sampling repeatable: the same seed gives the same answer, alone or in a batch.",
    ),
    _field(
        "repetition_penalty",
        Kind.FLOAT,
        _both(Bounds(0, FLOAT32_MAX, low_open=True), 1.0),
        "Above 1 makes tokens of the prompt and of the answer less probable, below 1 more.",
    ),
    _field("details", Kind.BOOLEAN, _both(default=False), "Add `details` to the answer."),
    _field(
        "typical_p",
        Kind.FLOAT,
        _both(Bounds(0, 1.0, low_open=True), 1.0, generate=EXTENSION),
        "Typical sampling.",
        "Checked, and without effect, as documented.",
    ),
    _field(
        "watermark",
        Kind.BOOLEAN,
        _both(default=False, generate=EXTENSION),
        "Watermark the text.",
        "Checked, and without effect, as documented.",
    ),
    _field(
        "priority",
        Kind.UNSIGNED,
        _both(Bounds(1, LOWEST_PRIORITY), LOWEST_PRIORITY, generate=EXTENSION),
        "1 is served first, 5 last.",
    ),
    _field(
        "timeout",
        Kind.UNSIGNED,
        _both(Bounds(1, 3600), int(DEFAULT_TIMEOUT_S), generate=EXTENSION),
        "Seconds from arrival after which the request ends with an error.",
    ),
    Field(
        "batch_size",
        Kind.INTEGER,
        "Batch size of the request.",
        "Checked, and without effect: the server batches by itself.",
        generate=Rule(GENERATE_DOC, Place.EITHER, Bounds(1, INT32_MAX), 1),
    ),
    _field(
        "stop",
        Kind.STOP,
        _both(native=EXTENSION, generate=EXTENSION, note="none"),
        f"Text that ends the answer and is not part of it: a string, or at most {MAX_STOP_STRINGS} strings, "
        f"each of 1 to {MAX_STOP_CHARS} characters.",
    ),
    _field(
        "ignore_eos",
        Kind.BOOLEAN,
        _both(default=False, native=EXTENSION, generate=EXTENSION),
        "An end-of-sequence token does not end the answer.",
    ),
    _field(
        "skip_special_tokens",
        Kind.BOOLEAN,
        _both(default=True, native=EXTENSION, generate=EXTENSION),
        "Leave special tokens out of the text.",
    ),
    _field(
        "min_new_tokens",
        Kind.INTEGER,
        _both(Bounds(0, INT32_MAX), 0, native=EXTENSION, generate=EXTENSION),
        "Neither an end-of-sequence token nor a stop string ends the answer before this many tokens.",
        "Lowered silently to the output length that applies.",
    ),
    _field(
        "presence_penalty",
        Kind.FLOAT,
        _both(Bounds(-2.0, 2.0), 0.0, native=EXTENSION, generate=EXTENSION),
        "Subtracted from the logit of every token that the answer already has.",
    ),
    _field(
        "frequency_penalty",
        Kind.FLOAT,
        _both(Bounds(-2.0, 2.0), 0.0, native=EXTENSION, generate=EXTENSION),
        "Subtracted once for every time that the answer has the token.",
    ),
    _field(
        "min_p",
        Kind.FLOAT,
        _both(Bounds(0.0, 1.0), 0.0, native=EXTENSION, generate=EXTENSION),
        "Drop tokens less probable than this share of the most probable one.",
    ),
)
"""The table."""


def fields_of(dialect: Dialect) -> tuple[tuple[Field, Rule], ...]:
    """The dialect's fields with their rules, in the order in which they are checked."""
    return tuple((field, rule) for field in FIELDS if (rule := field.rule(dialect)) is not None)
