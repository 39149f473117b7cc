"""`tengserve npu-selfcheck` as a user runs it, on chips that are simulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.model_folders import add_model
from support.tiny_model import build_tiny_model

TIMEOUT_S = 380.0
"""A minute on a machine with nothing else to do."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model whose heads the fused attention takes."""
    root = tmp_path_factory.mktemp("repository")
    build_tiny_model(add_model(root, "tiny"), config_overrides={"head_dim": 64})
    return root


def selfcheck(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | variables
    return subprocess.run(
        [sys.executable, "-m", "tengserve_adapter", "npu-selfcheck", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def report(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines between the fences; torch-npu prints a warning of its own before."""
    lines = done.stdout.splitlines()
    assert lines[-1] == "```", done.stdout + done.stderr
    return lines[lines.index("```text") + 1 : -1]


@pytest.mark.parametrize(
    ("soc", "attention", "formats"),
    [
        ("Ascend910B4", "npu-fused", "float32, float16, bfloat16"),
        ("Ascend310P3", "portable", "float32, float16"),
    ],
)
def test_the_report_of_a_chip_that_works(repository: Path, soc: str, attention: str, formats: str) -> None:
    done = selfcheck("--model-repository", str(repository), NPU_SIM_SOC=soc)
    lines = report(done)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith("tengserve npu-selfcheck: passed on a SIMULATED NPU: no chip was used")
    text = "\n".join(lines)
    assert f"device: npu:0, {soc}, " in text
    assert f"number formats: {formats}\n" in text
    assert re.search(r"memory: \d+\.\d GiB free of \d+\.\d GiB", text)
    assert f"attention {attention}" in text
    assert re.search(r"32 tokens alone: the first after [\d.]+ s, then [\d.]+ tokens/s", text)
    assert text.count(", right (bound ") == (12 if attention == "npu-fused" else 2)


def test_a_lost_device_is_reported_and_nothing_is_tried_after_it() -> None:
    done = selfcheck("--no-model", NPU_SIM_FAULT_CODE="507015", NPU_SIM_FAULT_PASSES="20")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = report(done)
    assert "NPU error 507015: a kernel failed on the device" in lines[-2] + lines[-1]
    assert "FAILED" in lines[0]


def test_an_npu_that_is_not_there_is_reported() -> None:
    done = selfcheck("--no-model", "--device", "npu:1")
    assert done.returncode == 1
    lines = report(done)
    assert "FAILED (the device)" in lines[0]
    assert "the device cannot be used: device is 'npu:1', but the process sees NPUs 0 to 0" in lines[-1]
