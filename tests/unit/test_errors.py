"""What an error may tell a client."""

from __future__ import annotations

import pytest

from tengserve_backend.errors import foreign_reason


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("first\nsecond", "first"),
        ("\n  \n  third  ", "third"),
        ("", "ValueError"),
        ("cannot read /models/my model/config.json", "cannot read the model's folder/config.json"),
        ("cannot read /root/.cache/x/y.py, sorry", "cannot read ..., sorry"),
        ("see https://example.org/a/b and '/a/b'", "see ... and '...'"),
        ("3 tokens/s or 1/2", "3 tokens/s or 1/2"),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_a_foreign_reason_is_one_bounded_line_without_paths(text, shown):
    assert foreign_reason(ValueError(text), "/models/my model") == shown
