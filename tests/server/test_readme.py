"""The README's commands, against the real server with the quick-start model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.readme import ROOT, blocks, commands
from support.server_process import ServerProcess

CONVERSION_TIMEOUT_S = 170.0
"""A machine without the weights cache converts the model first."""


URL = "http://127.0.0.1:8080"


@pytest.mark.timeout(CONVERSION_TIMEOUT_S + 300.0)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_its_commands_work_and_answer_as_it_says(tmp_path: Path) -> None:
    # The answers in it are those of float32, which is not every CPU's default.
    repository = shutil.copytree(ROOT / "model_repository", tmp_path / "models")
    with (repository / "smollm2" / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write('parameters { key: "dtype" value { string_value: "float32" } }\n')
    with ServerProcess("--model-repository", str(repository)) as server:
        server.wait_for(re.compile("tengserve is ready"), "stdout", CONVERSION_TIMEOUT_S)
        answers = []
        for command in commands():
            if "curl " not in command:
                continue
            # What curl says of its progress would stand between the lines of a stream.
            here = command.replace(URL, server.url).replace("curl ", "curl --no-progress-meter ")
            result = subprocess.run(["sh", "-c", here], capture_output=True, text=True, timeout=120, check=True)
            if not command.startswith("curl "):
                assert command.startswith("until ")
                continue
            events = [json.loads(line.removeprefix("data:")) for line in result.stdout.splitlines() if line]
            assert all("error" not in event for event in events), result.stdout
            answers.append(events[-1])
        (program,) = blocks("python")
        printed = subprocess.run(
            [sys.executable, "-c", program.replace(URL, server.url)], capture_output=True, timeout=120, check=True
        ).stdout.decode("utf-8")
    (expected,) = blocks("json")
    assert answers[0] == json.loads(expected)
    assert printed.strip() == answers[0]["generated_text"].strip()
    assert answers[2]["generated_text"] == answers[0]["generated_text"], "the ids are those of the text"
    assert all(answer.get("generated_text") or answer.get("text_output") for answer in answers)
    assert "Paris" in answers[3]["text_output"]
    assert len(answers) == 5
