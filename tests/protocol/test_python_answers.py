"""What a python model does wrong, as each dialect tells it: infer, generate, its stream, and gRPC."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from support.asgi import app_with, client_of, sse_events
from support.fake_engine import FakeEngine
from support.grpc_client import infer_request, raw, running
from support.python_models import model

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""
CODE = """
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].request_id() == "hangs":
                while not requests[0].is_cancelled():
                    time.sleep(0.001)
            name = "OUT" if requests[0].request_id() else "X"
            output = pb_utils.Tensor(name, np.zeros(1, np.float32))
            return [pb_utils.InferenceResponse([output], parameters={"huge": 2**70})]
"""
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
HUGE = "The answer of model 'm' cannot be sent: parameter 'huge' must fit 64 bits, and takes 71."
NAME = "unexpected inference output 'X' for model 'm'"
LATE = "Request timeout expired"


@pytest.mark.parametrize(
    ("request_id", "status", "code", "says"),
    [
        ("1", 500, grpc.StatusCode.INTERNAL, HUGE),
        ("", 400, grpc.StatusCode.INVALID_ARGUMENT, NAME),
        ("hangs", 503, grpc.StatusCode.UNAVAILABLE, LATE),
    ],
)
async def test_each_dialect_says_it_with_its_own_status(
    tmp_path: Path, request_id: str, status: int, code: grpc.StatusCode, says: str
) -> None:
    with model(tmp_path, CODE, CONFIG, request_timeout_s=0.2 if request_id == "hangs" else 60) as m:
        async with client_of(app_with(FakeEngine(), tensor_models=[m])) as client:
            infer = await client.post("/v2/models/m/infer", json={"id": request_id, "inputs": [TENSOR]})
            assert (infer.status_code, infer.json()) == (status, {"error": says})
            body = {"id": request_id, "IN": 1}
            generate = await client.post("/v2/models/m/generate", json=body)
            assert (generate.status_code, generate.json()) == (status, {"error": says})
            stream = await client.post("/v2/models/m/generate_stream", json=body)
            told = stream.json() if request_id == "hangs" else sse_events(stream.text)[0]
            assert (stream.status_code, told) == (status, {"error": says})
        async with running() as server:
            server.models.models["m"] = m
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await server.send("ModelInfer", raw(infer_request("m", request_id), "IN", "FP32", [1], bytes(4)))
            assert (refused.value.code(), refused.value.details()) == (code, says)
