"""Mistakes of the operator: one line on stderr, status 2, before anything heavy is imported."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.model_folders import add_model
from support.server_process import START_TIMEOUT_S, environment, run_cli
from support.torch_npu_package import write_torch_npu
from tengserve_adapter.settings import ServerSettings
from tengserve_backend.errors import ConfigurationError

SCRIPTED_SERVER = Path(__file__).parents[1] / "support" / "scripted_server.py"


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
        ([], "a command is missing: serve, bench or npu-selfcheck"),
        (["serve"], "missing: --model-repository"),
        (["serve", "--http-prt", "80"], "unknown argument '--http-prt'; did you mean --http-port or --grpc-port?"),
        (["serve", "--http-port", "65536"], "--http-port must be from 0 to 65535, got 65536"),
        (["serve", "--http-port", "-1"], "--http-port must be from 0 to 65535, got -1"),
        (["serve", "--http-port", "8_0"], "--http-port must be a whole number from 0 to 65535, got '8_0'"),
        (["serve", "--drain-timeout-s", "nan"], "--drain-timeout-s must be from 0 to 86400, got nan"),
        (["serve", "--drain-timeout-s", "soon"], "--drain-timeout-s must be a number from 0 to 86400, got 'soon'"),
        (["serve", "--log-level", "loud"], "--log-level must be one of debug, info, warning, error, got 'loud'"),
        (
            ["serve", "--http-header-forward-pattern", "a(b"],
            "--http-header-forward-pattern must be a regular expression, got 'a(b'",
        ),
        (["serve", "--device", "gpu"], "--device must be auto, npu, npu:N, cuda, cuda:N or cpu, got 'gpu'"),
        (["serve", "--host", ""], "--host must be at least one character long, got ''"),
        (["serve", "--server-name", ""], "--server-name must be printable text of at least one character, got ''"),
        (["serve", "--server-name", "a\tb"], "--server-name must be printable text of at least one character, got"),
        (
            ["serve", "--model-control-mode", "all"],
            "--model-control-mode must be one of none, explicit, poll, got 'all'",
        ),
        (["serve", "--load-model", "a"], "--load-model needs --model-control-mode explicit"),
        (
            ["serve", "--model-control-mode", "explicit", "--load-model", ""],
            "--load-model must be at least one character",
        ),
        (
            ["serve", "--model-control-mode", "explicit", "--load-model", "a", "--load-model", "b"],
            'the model repository has no model "a"; it has none',
        ),
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
    with pytest.raises(ConfigurationError, match=r"--max-held-body-bytes must be at least .*, got 1999"):
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


def test_a_step_profile_without_a_place_is_told(scripted_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = ("--model-repository", str(scripted_repository), "--step-profile", str(tmp_path / "file" / "folder"))
    result = run_cli("serve", *flags)
    assert one_line(result) == "--step-profile cannot be made a folder: Not a directory"
    assert result.returncode == 2


def test_unknown_default_model(scripted_repository: Path) -> None:
    result = run_cli("serve", "--model-repository", str(scripted_repository), "--default-model", "scriptd")
    assert "--default-model must be a model of the repository (scripted), got 'scriptd'" in one_line(result)
    assert result.returncode == 2


def test_a_taken_port_is_one_line(scripted_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("serve", "--model-repository", str(scripted_repository), "--http-port", str(port))
    assert one_line(result) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use (HTTP, see --http-port)"
    )
    assert result.returncode == 1


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_an_npu_that_cannot_be_used_is_one_line(
    device: str, scripted_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["serve", "--model-repository", str(scripted_repository), "--http-port", "0", "--grpc-port", "0"]
    result = run_cli(*arguments, "--device", device)
    assert one_line(result).startswith(f"--device is '{device}', but torch-npu is not installed")
    assert result.returncode == 2
    monkeypatch.setenv("PYTHONPATH", str(write_torch_npu(tmp_path)))
    result = run_cli(*arguments, "--device", device, "--log-level", "error")
    assert one_line(result).startswith(f"--device is '{device}', but torch-npu is installed, but libascendcl.so")
    assert "set_env.sh" in result.stderr


def test_the_selfcheck_says_what_is_missing_in_a_report_to_paste() -> None:
    result = run_cli("npu-selfcheck")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[:2] == ["```text", "tengserve npu-selfcheck: FAILED (no NPU)"]
    assert lines[2].startswith("versions: tengserve ")
    assert "torch-npu is not installed" in lines[-2]
    assert lines[-1] == "```"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "--device must be npu or npu:N, got 'cuda'"),
        (["--model", "x"], "--model needs --model-repository"),
        (["--modl", "x"], "unknown argument '--modl'"),
    ],
)
def test_mistakes_of_the_selfcheck_are_one_line(arguments: list[str], message: str) -> None:
    result = run_cli("npu-selfcheck", *arguments)
    assert one_line(result).startswith(message)
    assert result.returncode == 2


def test_the_selfcheck_names_the_models_to_choose_from(scripted_repository: Path) -> None:
    add_model(scripted_repository, "another")
    result = run_cli("npu-selfcheck", "--model-repository", str(scripted_repository))
    assert one_line(result) == "--model is missing; the repository's LLMs are another, scripted"


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


def test_a_path_that_is_too_long_is_one_line() -> None:
    result = run_cli("serve", "--model-repository", "x" * 5000)
    assert "cannot be read" in one_line(result)
    assert len(result.stderr) < 2000
    assert result.returncode == 2


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\r\x9b2Jb", "a\u2028b\u202e"])
def test_control_characters_are_shown_and_not_sent(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    flag = "--model-repository"
    for arguments in ([flag, str(tmp_path)], [flag, name], [flag, str(tmp_path), name], [flag, ".", "--host", name]):
        result = run_cli("serve", *arguments)
        assert one_line(result).isprintable()
        assert result.returncode in (1, 2)


def test_without_stderr_an_error_is_told_to_nobody() -> None:
    result = run_without("2", "serve", "--model-repository", "/nothing")
    assert result.returncode == 2
    assert result.stdout == ""


def test_a_server_needs_no_stderr(scripted_repository: Path) -> None:
    flags = ("serve", "--http-port", "0", "--no-grpc", "--model-repository", str(scripted_repository))
    command = without("2", str(SCRIPTED_SERVER), *flags)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert "listens on" in process.stdout.readline()
            process.stdin.write("load\n")
            process.stdin.flush()
            assert "is ready" in process.stdout.readline()
            process.terminate()
            assert process.wait(START_TIMEOUT_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("number", ["0", "1"])
def test_a_taken_port_is_told_without_the_other_streams(number: str, scripted_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("serve", "--model-repository", str(scripted_repository), "--http-port", port, "--no-grpc")
        result = run_without(number, *flags)
    assert f"port {port}" in one_line(result)
    assert result.returncode == 1


def run_without(number: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`tengserve` without one of its standard streams."""
    command = without(number, "-m", "tengserve_adapter", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)


def without(number: str, *arguments: str) -> list[str]:
    """Python with these arguments and without one of its standard streams."""
    return ["sh", "-c", f'exec "$0" "$@" {number}>&-', sys.executable, *arguments]
