"""The real server process with the example's python model and one that crashes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import httpx

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
