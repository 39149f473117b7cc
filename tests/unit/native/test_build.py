"""The library is built once for each state of sources and compiler; its lack is said once. A stand-in compiles."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from tengserve_backend.native import build, load
from tengserve_backend.native.build import BuildError, build_library, find_compiler, find_library, main

# Writes what it was asked to the log and a file to what follows -o; fails when told to.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in 1"; exit 0; fi
echo "$*" >> "$STATE/log"
[ -e "$STATE/fail" ] && { echo "error: no such thing"; exit 3; }
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


class Toolbox:
    """A stand-in for a compiler, and sources."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.sources = folder / "src"
        self.state.mkdir()
        self.sources.mkdir()
        for name in ("operators.cpp", "rows_avx2.cpp", "rows_avx512_bf16.cpp", "rows.h"):
            (self.sources / name).write_text(f"// {name}\n")
        self.compiler = folder / "compiler"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        log = self.state / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def toolbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolbox:
    toolbox = Toolbox(tmp_path)
    monkeypatch.setenv("CXX", str(toolbox.compiler))
    monkeypatch.setenv("STATE", str(toolbox.state))
    monkeypatch.setenv("TENGSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", toolbox.sources)
    monkeypatch.setattr(load, "_once", load._Once())
    return toolbox


def built(toolbox: Toolbox) -> Path:
    compiler = find_compiler()
    assert compiler is not None
    return build_library(compiler)


def test_it_is_built_once_and_found_again(toolbox: Toolbox) -> None:
    assert find_library(find_compiler()) is None
    library = built(toolbox)
    assert library.read_text() == "made\n"
    count = len(toolbox.commands)
    assert built(toolbox) == library
    assert find_library(find_compiler()) == library
    assert len(toolbox.commands) == count == 4


def test_each_file_is_compiled_for_the_instructions_in_its_name(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    built(toolbox)
    flags = {
        Path(command.split(" -c ")[1].split()[0]).name: command for command in toolbox.commands if " -c " in command
    }
    assert "-mavx2" not in flags["operators.cpp"]
    assert "-mavx2" in flags["rows_avx2.cpp"]
    assert "-mavx512f" not in flags["rows_avx2.cpp"]
    assert "-mavx512bf16" in flags["rows_avx512_bf16.cpp"]


def test_elsewhere_no_such_flags_are_passed(toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    built(toolbox)
    assert not any("-mavx" in command for command in toolbox.commands)


def _edit_source(toolbox: Toolbox) -> None:
    (toolbox.sources / "rows.h").write_text("// changed\n")


def _add_source(toolbox: Toolbox) -> None:
    (toolbox.sources / "more.cpp").write_text("")


def _update_compiler(toolbox: Toolbox) -> None:
    toolbox.compiler.write_text(COMPILER.replace("stand-in 1", "stand-in 2"))


@pytest.mark.parametrize("change", [_edit_source, _add_source, _update_compiler])
def test_a_change_builds_anew(toolbox: Toolbox, change: Callable[[Toolbox], None]) -> None:
    library = built(toolbox)
    change(toolbox)
    assert find_library(find_compiler()) is None
    assert built(toolbox) != library


def test_another_torch_builds_anew(toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(toolbox)
    monkeypatch.setattr(build.torch, "__version__", "9.9")
    assert built(toolbox) != library


def test_without_a_compiler_what_another_one_built_is_taken(toolbox: Toolbox) -> None:
    library = built(toolbox)
    assert find_library(None) == library
    _edit_source(toolbox)
    assert find_library(None) is None


def test_a_compiler_that_fails_leaves_nothing_and_says_why(toolbox: Toolbox) -> None:
    (toolbox.state / "fail").touch()
    with pytest.raises(BuildError, match="status 3: error: no such thing"):
        built(toolbox)
    (toolbox.state / "fail").unlink()
    built(toolbox)


def test_an_unwritable_cache_says_what_to_do(toolbox: Toolbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENGSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set TENGSERVE_CACHE_DIR"):
        built(toolbox)


def test_a_compiler_that_is_not_there(toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(toolbox.state / "none"))
    assert find_compiler() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(toolbox.state))
    assert find_compiler() is None


def test_the_command_builds_or_says_why_not(toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (toolbox.state / "fail").touch()
    assert main(said.append) == 1
    (toolbox.state / "fail").unlink()
    assert main(said.append) == 0
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main(said.append) == 0
    assert ["cannot be built" in said[0], said[1:]] == [
        True,
        [
            "the CPU kernels are built\n",
            "no C++ compiler: the CPU will compute without kernels of its own, at less than half the speed\n",
        ],
    ]


def test_no_compiler_is_said_once(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(toolbox.state))
    assert [load.cpu_library().result(0) for _ in range(3)] == [None] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "there is no C++ compiler (g++ or clang++)" in line


def test_a_compiler_that_was_named_and_does_not_run_is_said(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert load.cpu_library().result(0) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CXX is /no/such/compiler, which does not run" in line


@pytest.mark.parametrize("end", ["", "from tengserve_adapter import lifecycle; lifecycle.end_now(0)"])
def test_a_process_that_ends_does_not_wait_for_a_build(toolbox: Toolbox, end: str) -> None:
    os.mkfifo(toolbox.state / "gate")
    toolbox.compiler.write_text(
        COMPILER.replace("echo made", 'echo $$ > "$STATE/pid"; read _ < "$STATE/gate"\necho made')
    )
    program = (
        "import pathlib, threading; from tengserve_backend.native import build, load; "
        f"build.SOURCES = pathlib.Path({str(toolbox.sources)!r}); load.cpu_library()\n"
        f"pid = pathlib.Path({str(toolbox.state / 'pid')!r})\n"
        "while not (pid.exists() and pid.read_text()): threading.Event().wait(0.01)\n" + end
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=100, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((toolbox.state / "pid").read_text()), 0)


def test_whoever_asks_does_not_wait_for_a_build(toolbox: Toolbox, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(toolbox.state / "gate")
    toolbox.compiler.write_text(COMPILER.replace("echo made", 'read _ < "$STATE/gate"\necho made'))
    caplog.set_level(logging.INFO)
    promise = load.cpu_library()
    assert not promise.done()
    ended = threading.Event()
    promise.add_done_callback(lambda _: ended.set())
    # Open for reading too, so that neither opening nor a compiler that ends can block or lose a line.
    with (toolbox.state / "gate").open("r+b", buffering=0) as gate:
        gate.write(b"go\n" * 4)
        assert ended.wait(30)
    # What the stand-in made is no library.
    assert promise.result() is None
    assert "they do not load" in caplog.text
    assert "file too short" in caplog.text


def late(toolbox: Toolbox, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says about a build that ends without a library, in its one warning."""
    caplog.set_level(logging.INFO)
    assert load.cpu_library().result(60) is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in warning
    return warning


def test_a_compiler_that_says_much_is_quoted_in_a_line(toolbox: Toolbox, caplog: pytest.LogCaptureFixture) -> None:
    noise = (
        'yes "a note of the compiler" | head -c 8000000; echo; echo "a.h:3: error: no space left on device"; echo end'
    )
    toolbox.compiler.write_text(COMPILER.replace("echo made", f"{noise}; exit 1\necho made"))
    warning = late(toolbox, caplog)
    assert warning.endswith("the compiler failed with status 1: a.h:3: error: no space left on device")
    assert len(caplog.text) < 10_000


def test_a_compiler_that_hangs_ends_with_all_that_it_started(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The driver waits for a child, as real ones do; both hold the pipe open for as long as they live.
    pipe = toolbox.state / "alive"
    os.mkfifo(pipe)
    hang = 'exec 3> "$STATE/alive"; echo it hangs; sleep 1000 & wait'
    toolbox.compiler.write_text(COMPILER.replace("echo made", f"{hang}\necho made"))
    monkeypatch.setattr(build, "_BUILD_TIMEOUT_S", 0.5)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert late(toolbox, caplog).endswith("the compiler was not done in 0 s")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody has it open for writing any more"
    os.close(reader)


def test_a_compiler_that_does_not_even_tell_its_version_is_none(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_VERSION_TIMEOUT_S", 0.5)
    toolbox.compiler.write_text("#!/bin/sh\nsleep 1000 & wait\n")
    assert find_compiler() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written (No space left on device)"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written (Read-only file system)"),
        (RuntimeError("who knows"), "the build failed"),
    ],
)
def test_whatever_ends_a_build_is_said_in_a_line(
    toolbox: Toolbox,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(build, "compile_library", fail)
    assert said in late(toolbox, caplog)


def test_a_file_system_without_locks_is_said(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert "its file system has no locks" in late(toolbox, caplog)


def test_a_damaged_library_is_built_anew(toolbox: Toolbox) -> None:
    library = built(toolbox)
    library.write_text("half of i")
    assert find_library(find_compiler()) is None
    assert built(toolbox).read_text() == "made\n"


def test_what_a_killed_server_left_does_not_keep_the_next_from_building(toolbox: Toolbox) -> None:
    compiler = find_compiler()
    assert compiler is not None
    leftover = built(toolbox).parent.with_suffix(".partial-killed")
    library = built(toolbox)
    library.parent.rename(leftover)
    assert find_library(compiler) is None
    assert built(toolbox) == library
    assert not leftover.exists()


def test_two_that_start_at_once_build_once(toolbox: Toolbox) -> None:
    os.mkfifo(toolbox.state / "gate")
    toolbox.compiler.write_text(COMPILER.replace("echo made", 'read _ < "$STATE/gate"\necho made'))
    with ThreadPoolExecutor(2) as servers, (toolbox.state / "gate").open("r+b", buffering=0) as gate:
        both = [servers.submit(built, toolbox) for _ in range(2)]
        gate.write(b"go\n" * 4)
        first, second = (server.result(60) for server in both)
    assert first == second
    assert len(toolbox.commands) == 4
