"""The commands and programs of the README, and of other pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str, page: str = "README.md") -> list[str]:
    """A page's blocks in a language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each command of the README's bash blocks, in order."""
    return [line for block in blocks("bash") for line in block.splitlines() if line]
