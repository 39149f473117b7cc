"""The real server process and a python model that does not come back, while the server is told to stop."""

from __future__ import annotations

import base64
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.python_models import write_model
from support.server_process import ServerProcess

HANGS = """
    import pathlib, sys, time

    class TritonPythonModel:
        def execute(self, requests):
            print("began", requests[0].request_id(), file=sys.stderr, flush=True)
            while True:
                time.sleep(0.01)
"""
BODY = {"id": "1", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
IMPATIENT = """
import sys
from tengserve_adapter import cli, lifecycle
lifecycle.QUIET_STOP_S, lifecycle.STOP_TIMEOUT_S = 0.1, 0.5
raise SystemExit(cli.main(sys.argv[1:]))
"""
BEGAN = re.compile("began 1")


@contextmanager
def asking(url: str) -> Iterator[httpx.Client]:
    """A client that waits for an answer of the model, until it is closed."""
    with httpx.Client(base_url=url, timeout=60) as client:

        def ask() -> None:
            try:
                client.post("/v2/models/hangs/infer", json=BODY)
            except httpx.TransportError:
                return  # The server has ended.

        thread = threading.Thread(target=ask)
        thread.start()
        yield client
    thread.join(60)


def test_a_request_that_was_given_up_and_hangs_costs_a_stop_what_its_log_says(tmp_path: Path) -> None:
    write_model(tmp_path, "hangs", HANGS)
    with ServerProcess("--model-repository", str(tmp_path), program=("-c", IMPATIENT)) as server:
        url = server.wait_until_ready()
        with pytest.raises(httpx.TimeoutException), httpx.Client(base_url=url) as client:
            client.post("/v2/models/hangs/infer", json=BODY, timeout=httpx.Timeout(30, read=0.001))
        server.wait_for(BEGAN, "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        said = "\n".join(server.stderr)
    assert "model hangs may take up to 0.5 s to stop" in said
    assert "model hangs did not stop in 0.5 s and ends with the process" in said
    assert "not complete" not in said
    assert "0 answers" not in said


def test_an_answer_that_somebody_waits_for_is_counted(tmp_path: Path) -> None:
    write_model(tmp_path, "hangs", HANGS)
    flags = ("--model-repository", str(tmp_path), "--drain-timeout-s", "0.1")
    with ServerProcess(*flags, program=("-c", IMPATIENT)) as server, asking(server.wait_until_ready()):
        server.wait_for(BEGAN, "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        said = "\n".join(server.stderr)
    assert "1 answer may take up to 0.1 s to end" in said
    assert "1 answer not complete after 0.1 s" in said


def test_a_stop_at_once_leaves_no_files_of_load_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, repository = tmp_path / "temporary", tmp_path / "repository"
    temporary.mkdir()
    repository.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    write_model(tmp_path, "hangs", HANGS)
    parameters = {
        "config": '{"backend": "python", "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}]}',
        "file:1/model.py": base64.b64encode((tmp_path / "hangs" / "1" / "model.py").read_bytes()).decode(),
    }
    flags = ("--model-repository", str(repository), "--model-control-mode", "explicit")
    with ServerProcess(*flags) as server, asking_after_load(server.wait_until_ready(), parameters):
        server.wait_for(BEGAN, "stderr")
        assert list(temporary.glob("tengserve-models-*"))
        server.signal(signal.SIGTERM)
        server.wait_for(re.compile("stopping: received SIGTERM"), "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
    assert not list(temporary.glob("tengserve-models-*"))


@contextmanager
def asking_after_load(url: str, parameters: dict[str, str]) -> Iterator[None]:
    loaded = httpx.post(f"{url}/v2/repository/models/hangs/load", json={"parameters": parameters}, timeout=60)
    assert loaded.status_code == 200, loaded.text
    with asking(url):
        yield
