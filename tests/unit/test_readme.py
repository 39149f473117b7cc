"""The README: its commands exist, its requests are right, its links lead somewhere. tests/server runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from support.readme import ROOT, commands
from tengserve_backend.repository.pbtxt import parse_config
from tengserve_backend.repository.scan import scan_repository
from tengserve_backend.repository.settings import read_settings

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "model_repository" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_it_starts_with_one_command_and_tests_with_another() -> None:
    scripts = [command for command in commands() if command.startswith("scripts/")]
    assert scripts == ["scripts/serve", "scripts/test"]
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)


def test_its_requests_have_json_bodies_and_name_the_model_that_is_there() -> None:
    curls = [shlex.split(command) for command in commands() if command.startswith("curl ")]
    urls = [next(word for word in words if word.startswith("http://")) for words in curls]
    paths = ["infer", "infer", "infer_token", "v2/models/smollm2/generate", "v2/models/smollm2/generate_stream"]
    assert urls == [f"http://127.0.0.1:8080/{path}" for path in paths]
    (source,) = scan_repository(ROOT / "model_repository")
    for words in curls:
        json.loads(words[words.index("-d") + 1])
    assert source.name == "smollm2"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            linked = (page.parent / file) if file else page
            assert linked.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_configurations_are_right(page: Path) -> None:
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if "parameters {" in block:
            read_settings(parse_config(block, str(page)).parameters)
