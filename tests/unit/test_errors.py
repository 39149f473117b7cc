"""What an error may tell a client."""

from __future__ import annotations

import pytest

from tengserve_backend import errors
from tengserve_backend.errors import foreign_reason, one_line, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first\nsecond", "first"),
        ("\n  \n  third  ", "third"),
        ("", "ValueError"),
        ("cannot read /models/my model/config.json", "cannot read the model's folder/config.json"),
        ("cannot read /home/me/.cache/x/y.py, sorry", "cannot read ..., sorry"),
        ("see https://example.org/a/b and '/a/b'", "see ... and '...'"),
        ("3 tokens/s or 1/2", "3 tokens/s or 1/2"),
        ("bad \x1b[31m file", "bad \\x1b[31m file"),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_a_foreign_reason_is_one_bounded_line_without_paths(text: str, expected: str) -> None:
    assert foreign_reason(ValueError(text), "/models/my model") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, é, 中文, 😀", "plain text, é, 中文, 😀"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2J\x00\x7f\x9b", "\\x1b[2J\\x00\\x7f\\x9b"),
        ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    assert one_line(text) == expected
    assert shown(text) == expected


def test_a_long_value_is_cut_before_it_is_escaped() -> None:
    assert shown("x" * 65) == "x" * 61 + "..."
    assert shown("\n" * 65) == "\\n" * 61 + "..."


def test_work_on_a_foreign_reason_is_bounded_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for paths is quadratic in a text without any, and a client's words may be in the text."""
    lengths: list[int] = []

    class Recording:
        def sub(self, replacement: str, text: str) -> str:
            lengths.append(len(text))
            return text

    monkeypatch.setattr(errors, "_PATH", Recording())
    assert foreign_reason(ValueError("x" * 1_000_000), "/models/m") == "x" * 297 + "..."
    assert lengths
    assert max(lengths) <= 10_000


def test_an_error_that_cannot_even_be_shown_is_called_by_its_type() -> None:
    class Mute(Exception):  # noqa: N818  # the name of a foreign exception
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert foreign_reason(Mute(), "/models/m") == "Mute"
