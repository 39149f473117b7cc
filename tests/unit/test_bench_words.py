"""The words after `scripts/bench`: all in its help, and told where one is wrong."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, *arguments: str) -> str:
    """What a script prints that ends before it measures."""
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("arguments", [("--help",), ("servings",)])
def test_each_word_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    taken = re.search(r"^ +(\w+(?: \| \w+)+)\)$", (_SCRIPTS / "bench").read_text("utf-8"), re.MULTILINE)
    assert taken is not None
    listed = re.findall(r"^  (\w+) {2,}\w.*$", said(monkeypatch, capsys, "_bench", *arguments), re.MULTILINE)
    assert set(taken[1].split(" | ")) <= set(listed)


def test_a_wrong_word_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no measurement 'servings'; there are:" in said(monkeypatch, capsys, "_bench", "servings")


def test_a_word_after_its_flags_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "serving comes before its flags" in said(monkeypatch, capsys, "_bench", "--rounds", "1", "serving")


def test_the_help_of_serving_tells_its_own_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(said(monkeypatch, capsys, "_bench_serving", "--help").split())
    assert "Unset: plain transformers gives them first." in text
    assert "the first server's own" not in text
