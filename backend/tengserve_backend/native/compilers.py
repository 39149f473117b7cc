"""Running compilers: at a low priority, each in a process group of its own, and none longer than this process.

A compiler's driver starts others, which go on when only the driver is killed; so the group is.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_NICENESS = 10
"""Requests are answered meanwhile, perhaps on the same cores."""
_KILL_TIMEOUT_S = 1.0
_SHOWN_BYTES = 2000
_LINE_CHARACTERS = 300


class BuildError(Exception):
    """The library could not be built. The text, one line, is for the log.

    Attributes:
        said: the end of what the compiler said; "" when it was not the compiler that failed.
    """

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.said = said


class Compilers:
    """The compilers that run now: they end with the process, and the process does not wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        atexit.register(self.kill)

    def run(self, commands: Sequence[list[str]], folder: Path, *, jobs: int, timeout_s: float) -> None:
        """Run commands to their ends.

        Args:
            commands: in the order in which they are started.
            folder: takes what they say.
            jobs: how many run at once.
            timeout_s: for all of them.

        Raises:
            BuildError: one failed or cannot be started, or they took too long; none runs any more.
            OSError: there is no space for what they say.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(enumerate(commands))
        started: list[tuple[subprocess.Popen[bytes], Path]] = []
        try:
            while waiting or started:
                while waiting and len(started) < jobs:
                    index, command = waiting.pop(0)
                    said = folder / f"{index}.log"
                    started.append((self._start(command, said), said))
                process, said = started[0]
                try:
                    status = process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise BuildError(f"the compiler was not done in {timeout_s:.0f} s", _end(said)) from None
                if status != 0:
                    text = _end(said)
                    raise BuildError(f"the compiler failed with status {status}: {_telling_line(text)}", text)
                self._forget(started.pop(0)[0])
        finally:
            for process, _ in started:
                _kill(process)
                self._forget(process)

    def version(self, command: str, timeout_s: float) -> str | None:
        """What a compiler says of itself; None when it cannot be started, fails, or takes too long."""
        try:
            process = self._popen([command, "--version"], subprocess.PIPE, subprocess.DEVNULL)
        except OSError:
            return None
        with process:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill(process)
                self._forget(process)
        return said.decode("utf-8", "replace") if process.returncode == 0 else None

    def kill(self) -> None:
        """End those that run."""
        with self._lock:
            for process in self._running:
                _kill(process)
            for process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):  # Its disk hangs; nobody should wait for that.
                    process.wait(_KILL_TIMEOUT_S)  # So that it is gone when this process is.

    def _start(self, command: list[str], said: Path) -> subprocess.Popen[bytes]:
        with said.open("wb") as output:
            try:
                process = self._popen(command, output, subprocess.STDOUT)
            except OSError as error:
                raise BuildError(f"the compiler cannot be started: {error.strerror or type(error).__name__}") from error
        with contextlib.suppress(OSError):  # It has ended, or the system does not let us: then it runs as we do.
            os.setpriority(os.PRIO_PGRP, process.pid, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        return process

    def _popen(self, command: list[str], output: IO[bytes] | int, errors: int) -> subprocess.Popen[bytes]:
        with self._lock:
            process = subprocess.Popen(  # noqa: S603  # the operator's compiler
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0
            )
            self._running.add(process)
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._lock:
            self._running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a compiler and what it has started; its number is its own until it is waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(said: Path) -> str:
    """The end of what a compiler said, however much that was."""
    with said.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return stream.read().decode("utf-8", "replace").strip()


def _telling_line(text: str) -> str:
    """The line that says what is wrong, as far as one can tell."""
    lines = text.splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:_LINE_CHARACTERS]


compilers = Compilers()
"""Those of this process."""
