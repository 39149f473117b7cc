"""What errors echo: short, on one line, and nothing that moves a terminal's cursor."""

from __future__ import annotations

import pytest

from tengserve_backend.errors import foreign_reason, one_line, shown


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


def test_a_librarys_complaint_is_cut_and_printable() -> None:
    reason = foreign_reason(ValueError("\n\nbad \x1b[31m file\n" + "x" * 5000), "/folder")
    assert reason == "bad \\x1b[31m file"
    assert len(foreign_reason(ValueError("x" * 5000), "/folder")) == 300
