"""The programs on the protocols' pages, run as they stand there, but for the model's name and the addresses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.readme import blocks
from support.server_process import ServerProcess


@pytest.mark.parametrize("page", ["v2", "v2-grpc"])
def test_its_programs_work(page: str, tiny_server: ServerProcess) -> None:
    (program,) = blocks("python", f"docs/protocols/{page}.md")
    http = tiny_server.url.removeprefix("http://")
    for written, here in (("smollm2", "tiny"), ("127.0.0.1:8080", http), ("127.0.0.1:8081", tiny_server.grpc_address)):
        program = program.replace(written, here)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.strip()
