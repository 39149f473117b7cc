"""A server that starts without the CPU's kernels: it answers meanwhile, and goes over when they have been built.
A model with a quantization waits for them.

The compiler is a stand-in that ends when the test says so. What it "builds" is the real library, or nothing.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.cpu_kernels import kernels_device
from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model
from tengserve_backend.native.build import find_compiler, find_library

# Each file of the sources is nothing; the library is the real one, once a line has come through the gate.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "stand-in for the tests"; exit 0; }
shared=; output=
for argument; do
    [ "$argument" = -shared ] && shared=1
    [ "$before" = -o ] && output=$argument
    before=$argument
done
[ $shared ] || { : > "$output"; exit 0; }
read verdict < "$STATE/gate"
[ "$verdict" = build ] || { echo "fatal: the disk is full" >&2; exit 4; }
cp "$STATE/library" "$output"
"""

PROMPTS = [f"Once upon a time there were {number} servers" for number in ("two", "three", "seven")]
TOKENS = 96


class LateCompiler:
    """Says when the build ends, and how."""

    def __init__(self, folder: Path) -> None:
        kernels_device()
        library = find_library(find_compiler())
        assert library is not None
        (folder / "library").symlink_to(library)
        os.mkfifo(folder / "gate")
        # For reading too, so that neither opening nor a compiler that has ended blocks.
        self._gate = (folder / "gate").open("r+b", buffering=0)
        self._compiler = folder / "compiler"
        self._compiler.write_text(COMPILER)
        self._compiler.chmod(0o755)
        self.variables = {
            "CXX": str(self._compiler),
            "STATE": str(folder),
            "TENGSERVE_CACHE_DIR": str(folder / "cache"),
        }

    def end(self, verdict: str) -> None:
        """Let the build end: "build" or "fail"."""
        self._gate.write(f"{verdict}\n".encode())

    def close(self) -> None:
        self._gate.close()


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[LateCompiler]:
    late = LateCompiler(tmp_path)
    yield late
    late.close()


@contextmanager
def building(compiler: LateCompiler, tmp_path: Path, **parameters: str) -> Iterator[ServerProcess]:
    """A server that loads a model while the compiler runs."""
    repository = tmp_path / "repository"
    build_tiny_model(add_model(repository, "tiny", parameters={"device": "cpu", **parameters}))
    with ServerProcess("--model-repository", str(repository), variables=compiler.variables) as server:
        server.wait_for(re.compile("building the kernels for the CPU"), "stderr")
        yield server


@contextmanager
def started(compiler: LateCompiler, tmp_path: Path, **parameters: str) -> Iterator[ServerProcess]:
    """A server that is ready while the compiler is not."""
    with building(compiler, tmp_path, **parameters) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def waiting(compiler: LateCompiler, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose model waits for the compiler."""
    with building(compiler, tmp_path, quantization="int4") as server:
        server.wait_for(
            re.compile("model tiny: quantization int4 needs the kernels: waiting for their build"), "stderr"
        )
        server.wait_for(re.compile("^loading tiny: waiting for the kernels$"), "stderr")
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        yield server


def stream(url: str, prompt: str) -> str:
    """The text of a whole answer; fails unless every event came."""
    parameters = {"max_new_tokens": TOKENS, "ignore_eos": True, "do_sample": False}
    body = {"text_input": prompt, "parameters": parameters}
    with httpx.stream("POST", f"{url}/v2/models/tiny/generate_stream", json=body, timeout=120) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert not any('"error"' in line for line in lines), lines[-1]
    return "\n".join(re.sub(r'"(id|latency|time)[^,}]*', "", line) for line in lines)


def info(server: ServerProcess) -> dict[str, str]:
    """The labels of the metric that tells how the model runs."""
    (line,) = re.findall(r"^tengserve_model_info\{(.*)\} 1.0$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def test_it_answers_meanwhile_and_goes_over_while_streams_run(compiler: LateCompiler, tmp_path: Path) -> None:
    with started(compiler, tmp_path, dtype="float32") as server, ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert (info(server)["attention"], info(server)["fused"]) == ("portable", "")
        expected = [stream(server.url, prompt) for prompt in PROMPTS]
        assert len(set(expected)) == len(PROMPTS)
        running = threading.Barrier(len(PROMPTS) + 1)
        enough = threading.Event()

        def ask(prompt: str) -> set[str]:
            answers = {stream(server.url, prompt)}
            running.wait(60)
            while not enough.is_set():
                answers.add(stream(server.url, prompt))
            answers.add(stream(server.url, prompt))
            return answers

        asked = [clients.submit(ask, prompt) for prompt in PROMPTS]
        try:
            running.wait(60)
            compiler.end("build")
            server.wait_for(re.compile("model tiny goes over to fused operators: .*packed_linear"), "stderr")
            server.wait_for(re.compile("model tiny goes over to attention cpu-paged"), "stderr")
        finally:
            enough.set()
        assert [client.result(120) for client in asked] == [{answer} for answer in expected]
        assert info(server)["attention"] == "cpu-paged"
        assert {"packed_linear", "rms_norm", "rotary", "swiglu"} <= set(info(server)["fused"].split(","))
        assert info(server)["dtype"] == "float32"


def test_after_a_build_that_fails_a_model_goes_over_to_what_torch_has(compiler: LateCompiler, tmp_path: Path) -> None:
    with started(compiler, tmp_path, dtype="float32") as server:
        before = info(server)
        answer = stream(server.url, PROMPTS[0])
        compiler.end("fail")
        server.wait_for(
            re.compile("no kernels for the CPU, .* restarted: .* failed with status 4: fatal: the disk is full"),
            "stderr",
        )
        server.wait_for(re.compile("model tiny goes over to fused operators: packed_linear"), "stderr")
        assert stream(server.url, PROMPTS[0]) == answer
        assert (before["attention"], before["fused"]) == ("portable", "")
        assert info(server) == before | {"fused": "packed_linear"}


def test_a_quantized_model_tells_that_it_waits_for_the_build(compiler: LateCompiler, tmp_path: Path) -> None:
    with waiting(compiler, tmp_path) as server:
        compiler.end("build")
        server.wait_until_ready()
        assert info(server)["quantization"] == "int4"
        assert "packed_linear" in info(server)["fused"]
        assert sum("waiting for" in line for line in server.stderr) == 2, server.printed


def test_a_stop_does_not_wait_for_the_build(compiler: LateCompiler, tmp_path: Path) -> None:
    with waiting(compiler, tmp_path) as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 0
