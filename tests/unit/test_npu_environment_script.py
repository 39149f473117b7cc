"""scripts/_env_npu makes .venv-npu beside .venv, once, or says in one sentence why it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Plays the Python of .venv and of .venv-npu. It notes each pip call with the environment that it changes, and fails at
# what the file "fail" names.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-VV") echo "Python 3.11.0" ;;
    "-m venv "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip "*) echo "$(basename "$(dirname "$(dirname "$0")")") ${*: -1}" >> "$STATE/log" ;;
    "- "*) cat > /dev/null ;;
    *build.py*)
        echo "build" >> "$STATE/log"
        [ ! -e "$STATE/no-compiler" ] || { echo "there is no C compiler"; exit 1; } ;;
    *) exit 64 ;;
esac
[ "${*: -1}" != "$(cat "$STATE/fail" 2>/dev/null)" ]
"""

VERSIONS = ["2.10.0.post4", "2.12.0", "2.13.0", "2.14.0"]
ALL = [".venv-npu torch-npu", *(f".venv-npu torch-npu=={version}" for version in VERSIONS), "build"]


class Checkout:
    """A copy of what scripts/_env_npu needs, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.state = folder / "state"
        self.state.mkdir()
        for name in ("scripts/_env_npu", "tests/npu_sim/constraints.txt"):
            (self.root / name).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, self.root / name)
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        (self.root / "scripts" / "verb").write_text(
            f'set -euo pipefail\nroot={self.root}\nvenv=$root/.venv\n_env_log() {{ echo "$*" >&2; }}\n'
            'source "$root/scripts/_env_npu"\necho "missing: $npu_missing"\n'
        )

    def run(self) -> str:
        """What is missing."""
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / "verb")],
            env=os.environ | {"STATE": str(self.state)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("missing: ").strip()

    def done(self) -> list[str]:
        """What was done since the last call."""
        log = self.state / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_is_made_once(checkout: Checkout) -> None:
    assert checkout.run() == ""
    assert checkout.done() == ALL
    assert checkout.run() == ""
    assert checkout.done() == ["build"], "which compiles nothing that is up to date"


def test_the_shared_environment_is_not_written_to(checkout: Checkout) -> None:
    before = sorted(path for path in (checkout.root / ".venv").rglob("*"))
    checkout.run()
    assert sorted(path for path in (checkout.root / ".venv").rglob("*")) == before
    assert not [line for line in checkout.done() if line.startswith(".venv ")]


@pytest.mark.parametrize("name", ["scripts/_env_npu", "tests/npu_sim/constraints.txt"])
def test_it_is_made_again_when_what_it_depends_on_changes(checkout: Checkout, name: str) -> None:
    checkout.run()
    checkout.done()
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.run() == ""
    assert checkout.done() == ALL


@pytest.mark.parametrize(
    ("wheel", "said"),
    [("torch-npu", "torch-npu could not be installed"), ("torch-npu==2.12.0", "the wheel of torch-npu 2.12.0")],
)
def test_a_wheel_that_cannot_be_had_is_named_and_tried_again(checkout: Checkout, wheel: str, said: str) -> None:
    (checkout.state / "fail").write_text(wheel)
    assert checkout.run().startswith(said)
    checkout.done()
    (checkout.state / "fail").unlink()
    assert checkout.run() == ""
    assert checkout.done() == ALL


def test_without_a_compiler_it_says_so(checkout: Checkout) -> None:
    (checkout.state / "no-compiler").touch()
    assert checkout.run().startswith("there is no C compiler")
    (checkout.state / "no-compiler").unlink()
    checkout.done()
    assert checkout.run() == ""
    assert checkout.done() == ["build"]
