"""The life of the process, step by step: a scripted model loads, answers and dies when the test says so."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.model_folders import add_model
from support.server_process import ServerProcess

PROGRAM = (str(Path(__file__).parents[1] / "support" / "scripted_server.py"),)
STREAM = {"inputs": "Once", "stream": True, "parameters": {"max_new_tokens": 100}}


def start(repository: Path, *flags: str) -> ServerProcess:
    return ServerProcess("--model-repository", str(repository), *flags, program=PROGRAM)


@pytest.fixture
def loading(scripted_repository: Path) -> Iterator[ServerProcess]:
    """A server whose model is loading, and stays so until told otherwise."""
    with start(scripted_repository) as server:
        server.wait_for(re.compile("waiting for the script"), "stderr")
        yield server


@contextmanager
def ready(repository: Path, *flags: str) -> Iterator[ServerProcess]:
    with start(repository, *flags) as server:
        server.tell("load")
        server.wait_until_ready()
        yield server


def tell(server: ServerProcess, command: str) -> None:
    server.tell(command)
    server.wait_for(re.compile(f"^did {command}$"), "stderr")


@contextmanager
def open_stream(server: ServerProcess) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a running stream, of which the first has been read."""
    with httpx.stream("POST", f"{server.url}/infer", json=STREAM, timeout=60) as response:
        assert response.status_code == 200
        events = (json.loads(line.removeprefix("data:")) for line in response.iter_lines() if line.startswith("data:"))
        assert next(events)["token"]["text"] == "t1 "
        yield events


def test_live_at_once_and_ready_only_when_loaded(loading: ServerProcess) -> None:
    url = loading.url
    assert httpx.get(f"{url}/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", "/v2/models/scripted/ready"):
        response = httpx.get(url + path)
        assert response.status_code == 503
        assert "is loading" in response.json()["error"]
    answer = httpx.post(f"{url}/infer", json={"inputs": "Once"})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert not any("ready" in line for line in loading.stdout)

    loading.tell("load")
    loading.wait_until_ready()
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/scripted/ready"):
        assert httpx.get(url + path).status_code == 200


def test_progress_is_told_a_line_a_stage(loading: ServerProcess) -> None:
    loading.tell("load")
    loading.wait_until_ready()
    assert [line for line in loading.stderr if line.startswith("loading ")] == [
        "loading scripted: waiting for the script 50 %"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_process(loading: ServerProcess, number: signal.Signals) -> None:
    loading.signal(number)
    assert loading.wait() == 0


# The repository is looked at for as long as the test wants.
SCANNING = """
import sys
from tengserve_adapter import cli
from tengserve_backend.repository import live
def first_sources(*_):
    print("scanning", file=sys.stderr, flush=True)
    sys.stdin.read()
live.first_sources = first_sources
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_before_it_knows_its_models(tmp_path: Path, number: signal.Signals) -> None:
    with ServerProcess("--model-repository", str(tmp_path), program=("-c", SCANNING)) as server:
        server.wait_for(re.compile("scanning"), "stderr")
        server.signal(number)
        assert server.wait() == 0
        assert server.stderr == ["scanning"]


def test_a_signal_ends_the_process_though_an_engine_hangs(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        tell(server, "hang")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert any(re.search(r"model \w+ did not stop in 0.5 s", line) for line in server.stderr)


def test_a_signal_ends_the_process_though_the_load_hangs(scripted_repository: Path) -> None:
    with ServerProcess("--model-repository", str(scripted_repository), "--stuck", program=PROGRAM) as server:
        server.wait_for(re.compile("waiting for the device"), "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert any("the load did not end" in line for line in server.stderr)
        assert server.stderr[-1].endswith(": stopped at once")


def test_sigterm_lets_a_stream_end_and_admits_nothing_new(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server, open_stream(server) as events:
        server.signal(signal.SIGTERM)
        server.wait_for(re.compile("stopping: received SIGTERM"), "stderr")
        server.wait_for(re.compile("1 answer may take up to 30 s to end; a second Ctrl-C"), "stderr")
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
        refused = httpx.post(f"{server.url}/infer", json={"inputs": "Once"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0

        server.tell("token")
        assert next(events)["token"]["text"] == "t2 "
        server.tell("finish")
        assert next(events)["generated_text"] == "t1 t2 t3 "
        assert list(events) == []
        assert server.wait() == 0
        assert server.stderr[-1].endswith(": stopped")


def test_the_drain_ends_at_its_timeout_with_an_error_in_the_stream(scripted_repository: Path) -> None:
    with ready(scripted_repository, "--drain-timeout-s", "0.1") as server, open_stream(server) as events:
        server.signal(signal.SIGTERM)
        last = list(events)[-1]
        assert "stopped" in last["error"]
        assert server.wait() == 0
        assert any("1 answer not complete after 0.1 s" in line for line in server.stderr)


def test_a_second_signal_ends_the_process_now(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server, open_stream(server) as events:
        server.signal(signal.SIGTERM)
        server.wait_for(re.compile("stopping: received SIGTERM"), "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            next(events)


def test_a_model_that_fails_to_load_ends_the_process_with_its_reason(loading: ServerProcess) -> None:
    loading.tell("fail")
    assert loading.wait() == 1
    stopping = [line for line in loading.stderr if "stopping:" in line]
    assert len(stopping) == 1
    assert "model scripted, version 1 failed to load: The weights are damaged." in stopping[0]


def test_the_first_model_that_fails_to_load_ends_the_process(scripted_repository: Path) -> None:
    add_model(scripted_repository, "another")
    with start(scripted_repository) as server:
        server.tell("fail")
        assert server.wait() == 1
        assert any("model another, version 1 failed to load" in line for line in server.stderr)
        assert not any("model scripted, version 1 failed" in line for line in server.stderr)


def test_without_exit_on_error_the_server_stays_up_and_tells_the_reason(scripted_repository: Path) -> None:
    with start(scripted_repository, "--no-exit-on-error") as server:
        server.tell("fail")
        server.wait_for(re.compile("version 1: The weights are damaged"), "stderr")
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
        for path in ("/v2/health/ready", "/v2/models/scripted/ready"):
            response = httpx.get(server.url + path)
            assert response.status_code == 503
            assert "The weights are damaged." in response.json()["error"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_without_exit_on_error_the_models_that_loaded_are_announced(scripted_repository: Path) -> None:
    add_model(scripted_repository, "another")
    with start(scripted_repository, "--no-exit-on-error") as server:
        server.tell("fail")
        server.tell("load")
        server.wait_until_ready()
        server.wait_for(re.compile("/v2/models/scripted/generate_stream"), "stdout")
        assert "Models: scripted (not loaded: another)" in server.stdout
        assert any("--default-model NAME switches them on" in line for line in server.stdout)
        assert not any("curl" in line and "/infer" in line for line in server.stdout), "/infer means no model"


def test_a_dead_engine_fails_its_waiters_and_ends_the_process(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server, open_stream(server) as events:
        tell(server, "die")
        with contextlib.suppress(httpx.ConnectError):  # On a busy machine the process may have ended already.
            assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        last = list(events)[-1]
        assert "The device is gone." in last["error"]
        assert server.wait() == 1
        assert any("died: The device is gone." in line for line in server.stderr)


def test_a_lost_device_fails_its_waiters_and_ends_the_process_with_a_status_of_its_own(
    scripted_repository: Path,
) -> None:
    """Not by way of the interpreter's end, where torch-npu waits for the device."""
    with ready(scripted_repository, "--lingers") as server, open_stream(server) as events:
        tell(server, "lose")
        with contextlib.suppress(httpx.ConnectError):  # On a busy machine the process may have ended already.
            assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        assert "The device is gone." in list(events)[-1]["error"]
        assert server.wait() == 3
        assert any("died: The device is gone." in line for line in server.stderr)
        assert "lingers" not in server.stderr


@pytest.mark.parametrize("flag", ["--exit-on-error", "--no-exit-on-error"])
def test_a_device_that_fails_while_a_model_loads_ends_the_process_too(scripted_repository: Path, flag: str) -> None:
    with start(scripted_repository, flag) as server:
        server.wait_for(re.compile("waiting for the script"), "stderr")
        server.tell("lose")
        assert server.wait() == 3
        assert any("The device is gone." in line for line in server.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("command", "status"), [("die", 1), ("", 0)])
def test_a_signal_at_the_very_end_does_not_change_the_status(
    scripted_repository: Path, command: str, status: int, number: signal.Signals
) -> None:
    with ready(scripted_repository, "--lingers") as server:
        if command:
            server.tell(command)
        else:
            server.signal(number)
        server.wait_for(re.compile("^lingers"), "stderr")
        server.signal(number)
        assert server.wait() == status


def test_a_signal_after_a_failure_ends_the_process_now_with_the_failures_status(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        tell(server, "hang")
        server.tell("die")
        server.wait_for(re.compile("stopping: "), "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 1


def test_a_server_that_cannot_watch_its_engines_ends(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        server.tell("confuse")
        assert server.wait() == 1
        assert any("the lifecycle failed" in line for line in server.stderr)


def test_engine_numbers_and_answers_are_on_the_metrics_page(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        httpx.post(f"{server.url}/v2/models/nothing/generate", json={"text_input": "Once"})
        httpx.get(f"{server.url}/no/such/route/1")
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    labels = '{model="scripted",version="1"}'
    for line in (
        f"tengserve_model_ready{labels} 1.0",
        'tengserve_model_info{attention="none",device="cpu",dtype="float32",fused="",model="scripted",'
        'quantization="none",version="1"} 1.0',
        f"tengserve_generated_tokens_total{labels} 5.0",
        f"tengserve_kv_cache_free_blocks{labels} 8.0",
        f"nv_inference_pending_request_count{labels} 0.0",
        'tengserve_http_requests_total{route="/v2/models/{model}/generate",status="404"} 1.0',
        'tengserve_http_requests_total{route="other",status="404"} 1.0',
    ):
        assert line in lines
    assert not any(line.startswith("request_p") or "_created" in line for line in lines), "nothing but what is used"
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    ours = {line.split()[2] for line in lines if line.startswith(("# TYPE tengserve_", "# TYPE nv_inference_"))}
    assert ours == set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
