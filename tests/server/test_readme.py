"""The README's commands, against the real server with the quick-start model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from support.readme import ROOT, commands
from support.server_process import ServerProcess

CONVERSION_TIMEOUT_S = 170.0
"""A machine without the weights cache converts the model first."""


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_its_requests_are_answered() -> None:
    with ServerProcess("--model-repository", str(ROOT / "model_repository")) as server:
        server.wait_for(re.compile("tengserve is ready"), "stdout", CONVERSION_TIMEOUT_S)
        texts = []
        for command in commands():
            if not command.startswith("curl "):
                continue
            here = command.replace("http://127.0.0.1:8080", server.url)
            result = subprocess.run(
                ["sh", "-c", f"{here} --no-progress-meter"], capture_output=True, text=True, timeout=120, check=True
            )
            events = [json.loads(line.removeprefix("data:")) for line in result.stdout.splitlines() if line]
            assert all("error" not in event for event in events), result.stdout
            texts.append(events[-1].get("generated_text") or events[-1].get("text_output"))
    assert len(texts) == 3
    assert all(texts)
    assert "Paris" in texts[2]
