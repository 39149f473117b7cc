"""scripts/test has two stages, in two environments; arguments choose, and a missing simulation is said."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Plays both Pythons: notes what pytest is asked for, and answers with the status in the file beside it.
PYTHON = """#!/usr/bin/env bash
folder=$(dirname "$(dirname "$0")")
echo "$(basename "$folder") ${NPU_SIM:-0} $*" >> "$folder/../log"
exit "$(cat "$folder/status" 2>/dev/null || echo 0)"
"""


class Checkout:
    """A copy of scripts/test beside stand-ins for what it sources."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in ("scripts", "tests/npu_sim", "tests/unit", ".venv/bin", ".venv-npu/bin"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "test", folder / "scripts" / "test")
        (folder / "scripts" / "_env").write_text(f"root={folder}\nvenv=$root/.venv\n")
        self.lack("")
        for name in ("tests/unit/test_a.py", "tests/npu_sim/test_b.py"):
            (folder / name).touch()
        for environment in (".venv", ".venv-npu"):
            python = folder / environment / "bin" / "python"
            python.write_text(PYTHON)
            python.chmod(0o755)

    def lack(self, missing: str) -> None:
        """Leave the simulation out for a reason."""
        (self.root / "scripts" / "_env_npu").write_text(f"npu_venv=$root/.venv-npu\nnpu_missing='{missing}'\n")

    def answer(self, host: int = 0, npu: int = 0) -> None:
        """What pytest answers in each environment."""
        (self.root / ".venv" / "status").write_text(str(host))
        (self.root / ".venv-npu" / "status").write_text(str(npu))

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_SIM")} | variables
        return subprocess.run(
            ["bash", "scripts/test", *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def stages(self) -> list[str]:
        """What ran since the last call."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_both_stages_run(checkout: Checkout) -> None:
    assert checkout.run().returncode == 0
    assert checkout.stages() == [".venv 0 -m pytest", ".venv-npu 1 -m pytest tests/npu_sim"]


def test_options_go_to_both(checkout: Checkout) -> None:
    assert checkout.run("-k", "stop", "--durations=3").returncode == 0
    assert checkout.stages() == [
        ".venv 0 -m pytest -k stop --durations=3",
        ".venv-npu 1 -m pytest tests/npu_sim -k stop --durations=3",
    ]


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("tests/unit", ".venv 0 -m pytest -x tests/unit"),
        ("tests/unit/test_a.py::test_it", ".venv 0 -m pytest -x tests/unit/test_a.py::test_it"),
        ("tests/npu_sim", ".venv-npu 1 -m pytest -x tests/npu_sim"),
        ("tests/npu_sim/test_b.py::test_it", ".venv-npu 1 -m pytest -x tests/npu_sim/test_b.py::test_it"),
    ],
)
def test_a_path_chooses_the_stage(checkout: Checkout, path: str, stage: str) -> None:
    assert checkout.run("-x", path).returncode == 0
    assert checkout.stages() == [stage]


def test_paths_of_both_are_refused(checkout: Checkout) -> None:
    refused = checkout.run("tests/unit", "tests/npu_sim/test_b.py")
    assert refused.returncode == 2
    assert "not both" in refused.stderr
    assert checkout.stages() == []


@pytest.mark.parametrize(
    ("host", "npu", "status"),
    [(1, 0, 1), (0, 1, 1), (1, 2, 1), (0, 5, 0), (5, 0, 0), (5, 1, 1), (5, 5, 5)],
)
def test_the_status_is_that_of_both(checkout: Checkout, host: int, npu: int, status: int) -> None:
    checkout.answer(host, npu)
    assert checkout.run("-k", "x").returncode == status
    assert len(checkout.stages()) == 2


@pytest.mark.parametrize("status", [2, 130, 143])
def test_the_second_stage_does_not_follow_an_interrupted_one(checkout: Checkout, status: int) -> None:
    checkout.answer(host=status)
    assert checkout.run().returncode == status
    assert checkout.stages() == [".venv 0 -m pytest"]


def test_without_a_simulation_one_sentence_says_so(checkout: Checkout) -> None:
    checkout.lack("there is no C compiler")
    done = checkout.run()
    assert done.returncode == 0
    assert "The tests on the simulated NPU are left out: there is no C compiler.\n" in done.stdout
    assert checkout.stages() == [".venv 0 -m pytest"]


def test_ci_does_without_nothing(checkout: Checkout) -> None:
    checkout.lack("there is no C compiler")
    assert checkout.run(NPU_SIM_REQUIRED="1").returncode == 1
    assert "NPU_SIM_REQUIRED=1 scripts/test" in (ROOT / ".ci" / "run").read_text()
