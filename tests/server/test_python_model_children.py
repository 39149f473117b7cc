"""The real server process and a python model that has processes of its own."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import httpx

from support.python_models import write_model
from support.server_process import ServerProcess

# Each request has a pool of its own, and says what came of what its `request_id` names.
FORKS = """
    import multiprocessing, os, signal, sys, time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def work(kind):
        if kind == "hang":
            print("child", os.getpid(), file=sys.stderr, flush=True)
            while True:
                time.sleep(60)
        if kind == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("child", os.getpid(), file=sys.stderr, flush=True)
            time.sleep(3600)
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            return "goes on"
        request = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([b"square"], np.object_))],
        )
        request.exec()

    class TritonPythonModel:
        def execute(self, requests):
            kind = requests[0].request_id()
            if kind == "ignore":
                multiprocessing.get_context("fork").Process(target=work, args=[kind]).start()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())])]
            pool = multiprocessing.get_context("fork").Pool(1)
            try:
                said = pool.apply(work, [kind])
            except pb_utils.TritonModelException as error:
                said = str(error)
            pool.terminate()  # By SIGTERM.
            pool.join()
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([said.encode()], np.object_))])]
"""
CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [-1] }]
"""
URL = "/v2/models/m/infer"
CHILD = re.compile(r"child (\d+)")
ENDS_S = 30.0
IMPATIENT = """
import sys
from tengserve_adapter import cli, lifecycle
lifecycle.EXIT_TIMEOUT_S = 0.2
raise SystemExit(cli.main(sys.argv[1:]))
"""


def body(kind: str) -> dict[str, object]:
    return {"id": kind, "inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [""]}]}


def gone(pid: int) -> bool:
    """Whether it has ended; nobody may be there to ask for the status of a process whose parent is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + ENDS_S
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # It is not our child, so nothing tells of its end.
    assert gone(pid)


def test_signals_to_a_model_s_processes_are_not_the_server_s(tmp_path: Path) -> None:
    write_model(tmp_path, "m", FORKS, CONFIG)
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        with httpx.Client(base_url=server.wait_until_ready(), timeout=60) as client:
            for _ in range(2):
                # A Ctrl-C reaches every process of the terminal; the pool is ended by SIGTERM.
                reply = client.post(URL, json=body("interrupt"))
                assert reply.json()["outputs"][0]["data"] == ["goes on"]
            assert client.get("/v2/health/ready").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_process_of_a_model_is_told_that_it_cannot_ask_other_models(tmp_path: Path) -> None:
    write_model(tmp_path, "m", FORKS, CONFIG)
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        reply = httpx.post(server.wait_until_ready() + URL, json=body("bls"), timeout=60)
    assert reply.json()["outputs"][0]["data"] == [
        "BLS is only supported in the process of the server, not in one that the model has started."
    ]


def test_processes_that_a_model_left_running_end_with_a_server_that_is_ended_at_once(tmp_path: Path) -> None:
    write_model(tmp_path, "m", FORKS, CONFIG)
    with ServerProcess("--model-repository", str(tmp_path)) as server:
        url = server.wait_until_ready()

        def ask() -> None:
            try:
                httpx.post(url + URL, json=body("hang"), timeout=60)
            except httpx.TransportError:
                return  # The server has ended.

        asking = threading.Thread(target=ask)
        asking.start()
        child = int(server.wait_for(CHILD, "stderr")[1])
        server.signal(signal.SIGTERM)
        server.wait_for(re.compile("stopping: received SIGTERM"), "stderr")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        asking.join(60)
    wait_until_gone(child)


def test_a_process_that_does_not_end_by_itself_holds_no_stop_up(tmp_path: Path) -> None:
    write_model(tmp_path, "m", FORKS, CONFIG)
    with ServerProcess("--model-repository", str(tmp_path), program=("-c", IMPATIENT)) as server:
        reply = httpx.post(server.wait_until_ready() + URL, json=body("ignore"), timeout=60)
        assert reply.status_code == 200
        child = int(server.wait_for(CHILD, "stderr")[1])
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    wait_until_gone(child)
