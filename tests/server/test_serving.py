"""The real server with a real, tiny model, driven from outside."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model
from support.torch_npu_package import write_torch_npu


def test_it_listens_on_the_address_asked_for_and_no_other(tiny_server: ServerProcess) -> None:
    process = psutil.Process(tiny_server.process.pid)
    listening = [each.laddr.ip for each in process.connections() if each.status == psutil.CONN_LISTEN]
    # gRPC's socket takes IPv4 as mapped into IPv6.
    assert [address.removeprefix("::ffff:") for address in listening] == ["127.0.0.1", "127.0.0.1"]


def test_the_printed_commands_work_when_pasted(tiny_server: ServerProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    commands = [line.strip() for line in tiny_server.stdout if line.strip().startswith("curl ")]
    targets = [command.split()[2].removeprefix(tiny_server.url) for command in commands]
    assert targets == [
        "/infer",
        "/infer",
        "/infer_token",
        "/v2/models/tiny/generate",
        "/v2/models/tiny/generate_stream",
    ]
    for command in commands:
        result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        streams = command.startswith("curl -sN")
        events = [line.removeprefix("data:") for line in result.stdout.splitlines() if line]
        bodies = [json.loads(event) for event in events] if streams else [json.loads(result.stdout)]
        assert all("error" not in body for body in bodies), result.stdout
        assert "generated_text" in bodies[-1] or "text_output" in bodies[-1]


def test_the_reply_says_nothing_of_what_serves_it(tiny_server: ServerProcess) -> None:
    assert "server" not in httpx.get(f"{tiny_server.url}/v2/health/live").headers


def test_routes_of_kserve_stay_and_say_what_to_use(tiny_server: ServerProcess) -> None:
    assert httpx.get(f"{tiny_server.url}/v1/models").json() == {"models": ["tiny"]}
    for instance in ("Once", {"text_input": "Once"}):
        body = {"instances": [instance], "parameters": {"max_new_tokens": 4}}
        predict = httpx.post(f"{tiny_server.url}/v1/models/tiny:predict", json=body, timeout=60)
        assert predict.status_code == 200
        assert [type(text) for text in predict.json()["predictions"]] == [str]
    # As curl -d sends it, with the Content-Type of a form.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    text_input = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
    for base in ("/v2/models/tiny", "/v2/models/tiny/versions/1"):
        url = f"{tiny_server.url}{base}/infer"
        tensors = httpx.post(url, content=json.dumps({"inputs": [text_input]}), headers=form, timeout=60)
        assert tensors.status_code == 200
        assert tensors.json()["outputs"][0]["data"][0].startswith("Once")
        refused = httpx.post(url, data={"inputs": "[]"})
        assert (refused.status_code, list(refused.json())) == (400, ["error"])
    for response in (
        httpx.get(f"{tiny_server.url}/v2/models"),
        httpx.post(f"{tiny_server.url}/v1/models/tiny:predict", data={"instances": "[]"}),
        httpx.post(f"{tiny_server.url}/v1/models/nobody:predict", json={"instances": ["Once"]}),
    ):
        assert response.is_error == ("error" in response.json())
    for verb in ("load", "unload"):
        response = httpx.post(f"{tiny_server.url}/v2/repository/models/tiny/{verb}")
        assert (response.status_code, list(response.json())) == (503, ["error"])
    assert httpx.get(f"{tiny_server.url}/v2/models/tiny/ready").status_code == 200
    # KServe logs a traceback for each of these; the operator's log stays clean.
    assert not any("Traceback" in line for line in tiny_server.stderr)


def test_a_request_head_without_end_is_refused(tiny_server: ServerProcess) -> None:
    host, port = tiny_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n")
        client.sendall(b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(80)))
        assert client.recv(64).startswith(b"HTTP/1.1 431 ")
    assert httpx.get(f"{tiny_server.url}/v2/health/live").status_code == 200


def test_sigterm_in_the_middle_of_a_stream(tiny_repository: Path) -> None:
    body = {"inputs": "Once", "stream": True, "parameters": {"max_new_tokens": 100, "ignore_eos": True}}
    with ServerProcess("--model-repository", str(tiny_repository)) as server:
        server.wait_until_ready()
        with httpx.stream("POST", f"{server.url}/infer", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            events = [json.loads(next(lines).removeprefix("data:"))]
            server.signal(signal.SIGTERM)
            events += [json.loads(line.removeprefix("data:")) for line in lines]
        assert len(events) == 100
        assert "generated_text" in events[-1]
        assert server.wait() == 0


def test_broken_weights_end_the_process_with_the_reason(tiny_repository: Path, tmp_path: Path) -> None:
    version_dir = add_model(tmp_path, "broken")
    shutil.copytree(tiny_repository / "tiny" / "1", version_dir, dirs_exist_ok=True)
    (version_dir / "model.safetensors").write_bytes(b"these are no weights")
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        assert server.wait() == 1
        assert any("model broken, version 1 failed to load: " in line for line in server.stderr), server.printed


def test_several_models_in_one_repository(tmp_path: Path) -> None:
    build_tiny_model(add_model(tmp_path, "first"))
    build_tiny_model(add_model(tmp_path, "second"), "gpt2")
    with ServerProcess("--model-repository", str(tmp_path), "--default-model", "second") as server:
        url = server.wait_until_ready()
        texts = {}
        for name in ("first", "second"):
            body = {"text_input": "Once", "parameters": {"max_new_tokens": 8}}
            answer = httpx.post(f"{url}/v2/models/{name}/generate", json=body, timeout=60).json()
            assert answer["model_name"] == name
            texts[name] = answer["text_output"]
        native = httpx.post(f"{url}/infer", json={"inputs": "Once", "parameters": {"max_new_tokens": 8}}, timeout=60)
        assert native.json()["generated_text"] == texts["second"] != texts["first"]
        assert httpx.get(f"{url}/v1/models").json() == {"models": ["first", "second"]}
        server.wait_for(re.compile("/v2/models/second/generate_stream"), "stdout")
        assert "Models: first, second" in server.stdout
        assert "/infer and /infer_token mean second" in server.stdout


def test_a_log_record_is_one_line_whatever_the_client_sends(tiny_repository: Path) -> None:
    with ServerProcess("--model-repository", str(tiny_repository), "--log-level", "debug") as server:
        url = server.wait_until_ready()
        forged = "x\n2026-01-01T00:00:00.000 ERROR forged: line"
        httpx.post(f"{url}/infer", json={"inputs": "Once", forged: 1, "parameters": {"max_new_tokens": 1}}, timeout=60)
        server.wait_for(re.compile("unknown fields ignored"), "stderr")
        assert not any(line.startswith("2026-01-01T00:00:00.000") for line in server.stderr)


def test_a_torch_npu_without_cann_keeps_no_model_from_the_cpu(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and transformers both fail to import beside such a torch-npu."""
    monkeypatch.setenv("PYTHONPATH", str(write_torch_npu(tmp_path)))
    with ServerProcess("--model-repository", str(tiny_repository), "--device", "cpu") as server:
        server.wait_until_ready()
        answer = httpx.post(
            f"{server.url}/infer", json={"inputs": "Once", "parameters": {"max_new_tokens": 2}}, timeout=60
        )
        assert answer.status_code == 200
        assert sum("NPUs are not used: " in line for line in server.stderr) == 1


def test_a_model_that_names_an_npu_fails_to_load_with_what_is_missing(tmp_path: Path) -> None:
    build_tiny_model(add_model(tmp_path, "tiny", parameters={"device": "npu:0"}))
    with ServerProcess("--model-repository", str(tmp_path), "--device", "cpu") as server:
        assert server.wait() == 1
        assert any(
            "device is 'npu:0', but torch-npu is not installed: run `pip install" in line for line in server.stderr
        )
