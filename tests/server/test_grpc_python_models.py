"""Triton's own gRPC clients, every public method of them, against the real process with models of Python."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from importlib import metadata

import pytest

from support.python_models import write_model
from support.server_process import ServerProcess
from support.triton_process import run_client

HEAD = """
import json, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(request, *names):
    tensors = [pb_utils.get_input_tensor_by_name(request, name) for name in names]
    return [pb_utils.Tensor(name, tensor.as_numpy()) for name, tensor in zip(names, tensors)]

class TritonPythonModel:
"""

SIMPLE = """
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, f"INPUT{i}").as_numpy() for i in range(2))
            outputs = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""

ECHO = """
    def execute(self, requests):
        responses = []
        for request in requests:
            # A response's parameters may be no floats, a request's may.
            given = json.loads(request.parameters())
            parameters = {name: repr(value) if isinstance(value, float) else value for name, value in given.items()}
            responses.append(pb_utils.InferenceResponse(answer(request, "T", "H"), parameters=parameters))
        return responses
"""

REPEAT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for element in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([element], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

GATED = """
    def execute(self, requests):
        end = time.monotonic() + 30
        while time.monotonic() < end and not all(request.is_cancelled() for request in requests):
            time.sleep(0.01)
        error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""

ENDLESS = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse(answer(request, "IN")))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def tensors(kind: str, *entries: tuple[str, str, str]) -> str:
    return "".join(f'{kind} {{ name: "{name}" data_type: {type} dims: {dims} }}\n' for name, type, dims in entries)


NUMBER = tensors("input", ("IN", "TYPE_INT32", "[-1]"))
SUMS = (
    tensors("input", *((f"INPUT{index}", "TYPE_INT32", "[16]") for index in range(2)))
    + tensors("output", *((f"OUTPUT{index}", "TYPE_INT32", "[16]") for index in range(2)))
    + "max_batch_size: 8\n"
)
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
BOTH = (("T", "TYPE_STRING", "[-1, -1]"), ("H", "TYPE_FP16", "[-1]"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("python_models")
    models = {
        "echo": (ECHO, tensors("input", *BOTH) + tensors("output", *BOTH)),
        "endless": (ENDLESS, NUMBER + tensors("output", ("IN", "TYPE_INT32", "[-1]")) + DECOUPLED),
        "gated": (GATED, NUMBER + tensors("output", ("IN", "TYPE_INT32", "[-1]"))),
        "other": (SIMPLE, SUMS),
        "repeat": (REPEAT, NUMBER + tensors("output", ("OUT", "TYPE_INT32", "[1]")) + DECOUPLED),
        "simple": (SIMPLE, SUMS),
    }
    for name, (code, config) in models.items():
        write_model(root, name, HEAD + code, 'backend: "python"\n' + config)
    flags = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "*")
    with ServerProcess(*flags) as process:
        process.wait_until_ready()
        yield process


@pytest.mark.parametrize("kind", ["sync", "aio"])
async def test_every_method_of_the_client(server: ServerProcess, kind: str) -> None:
    number = {"data_type": "TYPE_INT32", "dims": [16]}
    config = {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": f"INPUT{index}", **number} for index in range(2)],
        "output": [{"name": f"OUTPUT{index}", **number} for index in range(2)],
    }
    expected = {
        "version": metadata.version("tengserve"),
        "models": ["echo", "endless", "gated", "other", "repeat", "simple"],
        "config": json.dumps(config),
        "files": {"file:1/model.py": base64.b64encode((HEAD + SIMPLE).encode()).decode()},
        "missing": "INTERNAL",
        "temperature": "0.7",
    }
    called = set((await run_client(kind, server.grpc_address, json.dumps(expected))).split())
    assert called >= set((await run_client("methods", kind)).split())
