"""Mistakes of the operator: one line on stderr, status 2, before anything heavy is imported."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.model_folders import add_model
from support.server_process import run_cli
from tengserve_adapter.settings import ServerSettings
from tengserve_backend.errors import ConfigurationError


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tengserve: error: ")
    return lines[0].removeprefix("tengserve: error: ")


def test_version() -> None:
    result = run_cli("--version")
    assert result.returncode == 0
    assert result.stdout.split()[0] == "tengserve"


def test_help_names_every_flag() -> None:
    result = run_cli("serve", "--help")
    assert result.returncode == 0
    for flag in ("--model-repository", "--host", "--http-port", "--drain-timeout-s", "--no-exit-on-error"):
        assert flag in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is missing: serve"),
        (["serve"], "missing: --model-repository"),
        (["serve", "--http-prt", "80"], "unknown argument '--http-prt'; did you mean --http-port?"),
        (["serve", "--http-port", "65536"], "--http-port must be from 0 to 65535, got 65536"),
        (["serve", "--http-port", "-1"], "--http-port must be from 0 to 65535, got -1"),
        (["serve", "--http-port", "8_0"], "--http-port must be a whole number from 0 to 65535, got '8_0'"),
        (["serve", "--drain-timeout-s", "nan"], "--drain-timeout-s must be from 0 to 86400, got nan"),
        (["serve", "--drain-timeout-s", "soon"], "--drain-timeout-s must be a number from 0 to 86400, got 'soon'"),
        (["serve", "--log-level", "loud"], "--log-level must be one of debug, info, warning, error, got 'loud'"),
        (["serve", "--host", ""], "--host must be at least one character long, got ''"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    if len(arguments) > 1:
        arguments = [*arguments, "--model-repository", str(tmp_path)]
    result = run_cli(*arguments)
    assert one_line(result).startswith(message)
    assert result.returncode == 2
    assert result.stdout == ""


def test_settings_can_hold_no_wrong_value() -> None:
    with pytest.raises(ConfigurationError, match="--max-body-bytes must be from 1024"):
        ServerSettings(model_repository=Path(), max_body_bytes=0)
    with pytest.raises(ConfigurationError, match="--max-held-body-bytes must be at least --max-body-bytes, 2000, got"):
        ServerSettings(model_repository=Path(), max_body_bytes=2000, max_held_body_bytes=1999)


def test_missing_repository(tmp_path: Path) -> None:
    result = run_cli("serve", "--model-repository", str(tmp_path / "nothing"))
    assert "is not a folder" in one_line(result)
    assert result.returncode == 2


def test_a_typo_in_a_config_is_told_with_its_place(tmp_path: Path) -> None:
    add_model(tmp_path, "typo")
    (tmp_path / "typo" / "config.pbtxt").write_text('name: "typo"\nbackend: "tengserve"\nmax_bach_size: 4\n')
    result = run_cli("serve", "--model-repository", str(tmp_path))
    assert "typo/config.pbtxt:3:1:" in one_line(result)
    assert result.returncode == 2


def test_unknown_default_model(scripted_repository: Path) -> None:
    result = run_cli("serve", "--model-repository", str(scripted_repository), "--default-model", "scriptd")
    assert "--default-model must be a model of the repository (scripted), got 'scriptd'" in one_line(result)
    assert result.returncode == 2


def test_a_taken_port_is_one_line(scripted_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("serve", "--model-repository", str(scripted_repository), "--http-port", str(port))
    assert one_line(result) == f"cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert result.returncode == 1


def test_an_unknown_host_is_one_line(scripted_repository: Path) -> None:
    result = run_cli("serve", "--model-repository", str(scripted_repository), "--host", "not a host")
    assert one_line(result).startswith("cannot listen on not a host: ")
    assert result.returncode == 1


def test_the_command_line_imports_nothing_heavy() -> None:
    program = (
        "import sys, tengserve_adapter.cli, tengserve_backend.repository.scan;"
        "print([name for name in ('torch', 'transformers', 'kserve', 'fastapi', 'pandas') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
