"""The table of fields and the typed values that are read by it belong together."""

from __future__ import annotations

from typing import get_type_hints

from tengserve_backend.generation.body import Values, read_body
from tengserve_backend.generation.fields import FIELDS, Dialect, fields_of

WITHOUT_EFFECT = {"parameters", "typical_p", "watermark", "batch_size"}
PROMPTS = {Dialect.NATIVE: {"inputs", "input_id", "stream"}, Dialect.GENERATE: {"id", "text_input"}}


def test_the_typed_values_are_the_fields_of_the_table() -> None:
    for dialect in Dialect:
        read = read_body(dialect, {}, max_text_chars=1)
        shared = set(get_type_hints(Values)) - PROMPTS[Dialect.NATIVE] - PROMPTS[Dialect.GENERATE]
        assert set(read.values) - WITHOUT_EFFECT == shared | PROMPTS[dialect]
        assert not read.given


def test_a_default_has_the_type_of_its_value() -> None:
    hints = get_type_hints(Values)
    for dialect in Dialect:
        for name, value in read_body(dialect, {}, max_text_chars=1).values.items():
            if name in hints:
                assert type(value) in (getattr(hints[name], "__args__", None) or (hints[name],)), name


def test_a_default_keeps_its_own_rule() -> None:
    """But for top_p on the native URLs, whose default the document forbids to be sent."""
    for dialect in Dialect:
        for field, rule in fields_of(dialect):
            if isinstance(rule.default, int | float) and rule.bounds is not None:
                exempt = dialect is Dialect.NATIVE and field.name == "top_p"
                assert rule.bounds.admits(rule.default) is not exempt


def test_names_are_unique() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)
