"""The real server process with the example's python model and one that crashes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from support.python_models import write_model
from support.server_process import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "model_repository"
CRASH = """
    class TritonPythonModel:
        def execute(self, requests):
            raise RuntimeError("broken")
"""


def pair(first: str, second: str) -> dict[str, object]:
    return {
        "inputs": [
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            for name, text in (("TEXT_A", first), ("TEXT_B", second))
        ]
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_line_to_paste_asks_a_python_model_for_an_inference(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "text_similarity", tmp_path / "text_similarity")
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        server.wait_until_ready()
        command = server.wait_for(re.compile("^  curl .*"), "stdout").group()
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    (output,) = json.loads(answer.stdout)["outputs"]
    assert (output["name"], output["data"]) == ("SIMILARITY", [1.0])


def test_the_lines_to_paste_are_an_llms_when_there_is_one(tiny_repository: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_repository / "tiny", tmp_path / "tiny")
    write_model(tmp_path, "a_model_before_it", CRASH)
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        server.wait_until_ready()
        server.wait_for(re.compile("/v2/models/tiny/generate_stream"), "stdout")
        assert not any("curl" in line and "a_model_before_it" in line for line in server.stdout)


def test_python_models_are_served_and_a_crash_is_the_request_s_alone(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "text_similarity", tmp_path / "text_similarity")
    write_model(tmp_path, "crash", CRASH)
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        with httpx.Client(base_url=server.wait_until_ready(), timeout=60) as client:
            for _ in range(2):
                reply = client.post(
                    "/v2/models/crash/infer",
                    json={"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]},
                )
                assert reply.status_code == 500
                assert reply.json() == {
                    "error": "Failed to process the request(s) for model instance 'crash_0_0', message: "
                    "RuntimeError: broken"
                }
                reply = client.post("/v2/models/text_similarity/infer", json=pair("abcd", "abcx"))
                assert reply.status_code == 200
                (output,) = reply.json()["outputs"]
                assert (output["datatype"], output["shape"]) == ("FP32", [1, 1])
                assert abs(output["data"][0] - 1 / 3) < 1e-6
            page = client.get("/metrics").text
        assert 'text_similarity_pairs_total{version="1"} 2.0' in page
        assert 'nv_inference_request_success{model="text_similarity",version="1"} 2.0' in page
        assert 'nv_inference_request_failure{model="crash",reason="BACKEND",version="1"} 2.0' in page
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
