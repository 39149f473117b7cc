"""A real server process for black-box tests: started on a free port, read line by line, never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

START_TIMEOUT_S = 150.0
"""A busy machine imports torch slowly; the tests only wait as long as the process itself takes."""

_URL = re.compile(r"listens on (http://\S+)")
_GRPC = re.compile(r"listens for gRPC on (\S+)")
_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment of a program under test."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    # For the programs of tests/support, which import their neighbours as the tests do.
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "tests"), *filter(None, [variables.get("PYTHONPATH")])])
    return variables


class ServerProcess:
    """`tengserve serve --http-port 0 --grpc-port 0 ...`; a context manager that kills what it started.

    Waiting means reading: every wait returns at the line that it waits for, or fails with all that was printed.
    """

    def __init__(
        self,
        *flags: str,
        program: Sequence[str] = ("-m", "tengserve_adapter"),
        port: int | None = 0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process.

        Args:
            flags: of `tengserve serve`.
            program: what Python runs.
            port: --http-port; None leaves the flag out.
            variables: of its environment, besides those of this process.
        """
        chosen = ["--grpc-port", "0"] if port is None else ["--http-port", str(port), "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *chosen, *flags],
            cwd=_ROOT,
            # Warnings of libraries are not what these tests are about, and pytest's options must not leak in.
            env={**environment(), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._stdin = self.process.stdin
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._open = {"stdout", "stderr"}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for stream in (self._stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    @property
    def url(self) -> str:
        """Where the server listens; waits until it does."""
        return self.wait_for(_URL, "stdout")[1]

    @property
    def grpc_address(self) -> str:
        """Where the server listens for gRPC; waits until it does."""
        return self.wait_for(_GRPC, "stdout")[1]

    def wait_until_ready(self) -> str:
        """Wait until the server says that it is ready; its URL."""
        self.wait_for(re.compile("tengserve is ready"), "stdout")
        return self.url

    def wait_for(self, pattern: re.Pattern[str], stream: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first match of a pattern in a line of "stdout" or "stderr"."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                lines = self._lines[stream]
                for line in lines[seen:]:
                    if found := pattern.search(line):
                        return found
                seen = len(lines)
                left = deadline - time.monotonic()
                if stream not in self._open or left <= 0:
                    raise AssertionError(f"no line matches {pattern.pattern!r}; printed:\n{self._printed()}")
                self._changed.wait(left)

    def tell(self, line: str) -> None:
        """Write a line to the process's stdin."""
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Wait for the end; the exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process did not end; printed:\n{self.printed}") from None
        for reader in self._readers:
            reader.join(10)
        return status

    @property
    def stdout(self) -> list[str]:
        """The lines printed so far."""
        with self._changed:
            return list(self._lines["stdout"])

    @property
    def stderr(self) -> list[str]:
        """The lines printed so far."""
        with self._changed:
            return list(self._lines["stderr"])

    @property
    def printed(self) -> str:
        """All that was printed so far, for the message of a failing test."""
        with self._changed:
            return self._printed()

    def _printed(self) -> str:
        return "\n".join(f"{name}: {line}" for name, lines in self._lines.items() for line in lines)

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self._lines[name].append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._open.discard(name)
            self._changed.notify_all()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`tengserve` with these arguments, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tengserve_adapter", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
