"""Whatever clients send, over HTTP and gRPC, the real process answers it, goes on, and does not grow.

A run of the tests sends a fixed set. TENGSERVE_FUZZ_MINUTES sends for so long instead, something else each time.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from support.fuzz_messages import NAMES, Input, infer_requests, messages, numbers, on_the_wire
from support.fuzz_wire import Wire
from support.infer_bodies import BODIES, JSON, LENGTHS, PARAMETERS
from support.model_folders import add_model
from support.python_models import write_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model
from tengserve_adapter.grpc.schema import HEALTH, INFERENCE, schema
from tengserve_backend.inference import Datatype

MINUTES = float(os.environ.get("TENGSERVE_FUZZ_MINUTES", "0"))
EXAMPLES = 30
"""Of each family; the first third is the warm-up."""
WARM_UP_ROUNDS = 3
GROWTH_BYTES = 32 * 2**20
FEW = 8
"""Threads and files that pools may still come to; one an example would be hundreds."""
MAX_BODY_BYTES = 100_000
LARGE = 20_000
"""Elements of a good request: it fits when less than a fifth of what may be held is."""

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            outputs = [pb_utils.Tensor("OUT", tensor.as_numpy()) for tensor in request.inputs()[:1]]
            response = pb_utils.InferenceResponse(outputs)
            if DECOUPLED:
                request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                responses.append(response)
        return None if DECOUPLED else responses
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
input { name: "TEXT" data_type: TYPE_STRING dims: [-1] optional: true }
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
"""
BATCHED = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1 }
input [{ name: "IN" data_type: TYPE_INT32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [4] }]
"""
INT, TEXT = Input("IN", Datatype.INT32, (2,)), Input("TEXT", Datatype.BYTES, (1,))
INPUTS = {
    "identity": [INT, TEXT],
    "decoupled": [INT, TEXT],
    "batched": [Input("IN", Datatype.INT32, (1, 4))],
    "tiny": [Input("text_input", Datatype.BYTES, (1,))],
}

WORDS = (*NAMES, "spare", "1", "log_verbose_level", "trace_level", INFERENCE)


def _words(method: str) -> tuple[str, ...]:
    """What fits a method; the models that others are asked for stay."""
    return WORDS if method in ("RepositoryModelLoad", "RepositoryModelUnload") else (*WORDS, *INPUTS)


UNARY = [
    (service, method)
    for service in (INFERENCE, HEALTH)
    for method in schema().service(service).methods
    if method.name not in ("ModelStreamInfer", "Watch")
]
CALLS = st.sampled_from(UNARY).flatmap(
    lambda call: st.tuples(
        st.just((call[0], call[1].name)), on_the_wire(messages(call[1].input_type, _words(call[1].name)))
    )
)
REQUESTS = on_the_wire(infer_requests(INPUTS))
COUNTS = numbers(-(2**63), 2**64 - 1) | st.integers(0, 3) | JSON
CONFIGS = st.fixed_dictionaries(
    {"backend": st.sampled_from(["python", "python", "tengserve", ""])},
    optional={
        "name": st.sampled_from(["spare", "other"]),
        "max_batch_size": COUNTS,
        "instance_group": st.lists(
            st.fixed_dictionaries({}, optional={"count": COUNTS, "kind": st.sampled_from(["KIND_CPU", 9])}), max_size=2
        ),
        "dynamic_batching": st.fixed_dictionaries(
            {},
            optional={
                "preferred_batch_size": st.lists(COUNTS, max_size=2),
                "max_queue_delay_microseconds": COUNTS,
                "priority_levels": COUNTS,
                "default_priority_level": COUNTS,
                "default_queue_policy": st.fixed_dictionaries({}, optional={"max_queue_size": COUNTS}),
            },
        ),
        "version_policy": st.fixed_dictionaries({}, optional={"latest": JSON, "specific": JSON}),
        "input": st.lists(
            st.fixed_dictionaries(
                {"name": st.just("IN"), "data_type": st.sampled_from(["TYPE_INT32", "INT32", 3])},
                optional={"dims": st.lists(COUNTS, max_size=3), "reshape": JSON},
            ),
            max_size=2,
        ),
        "parameters": JSON,
    },
)
CODES = st.sampled_from(["", "\0", "raise SystemExit(0)", "def", MODEL.replace("DECOUPLED", "False")])
PATHS = st.lists(
    st.sampled_from(
        ["v2", "v1", "models", "repository", "index", "health", "ready", "infer", "versions", "1", "config"]
    )
    | st.sampled_from([*INPUTS, "stats", "logging", "trace", "setting", "systemsharedmemory", "region", "x", "status"])
    | st.text(max_size=4),
    max_size=7,
).map(lambda parts: "/" + "/".join(quote(part, safe="") for part in parts))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzzed")
    for name, config in (("identity", CONFIG), ("spare", CONFIG), ("decoupled", CONFIG), ("batched", BATCHED)):
        decoupled = name == "decoupled"
        policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
        write_model(root, name, MODEL.replace("DECOUPLED", str(decoupled)), config + policy)
    parameters = {"maxIterTimes": "4", "maxSeqLen": "256", "maxBatchSize": "8"}
    build_tiny_model(add_model(root, "tiny", parameters=parameters))
    return root


@pytest.fixture
def wire(repository: Path) -> Iterator[Wire]:
    limit = str(MAX_BODY_BYTES)
    limits = ("--max-body-bytes", limit, "--max-tensor-bytes", limit, "--max-held-body-bytes", limit)
    control = ("--model-control-mode", "explicit", "--load-model", "*")
    with ServerProcess("--model-repository", str(repository), *control, *limits) as server:
        server.wait_until_ready()
        with Wire(server, str(repository)) as wire:
            yield wire


def any_rpc(wire: Wire, call: tuple[tuple[str, str], bytes]) -> None:
    (service, method), data = call
    wire.rpc(service, method, data)


def one_infer(wire: Wire, request: bytes) -> None:
    wire.rpc(INFERENCE, "ModelInfer", request)


def one_stream(wire: Wire, requests: list[bytes]) -> None:
    ends = 0
    for response in wire.stream(requests):
        ends += response.infer_response.parameters["triton_final_response"].bool_param
    assert ends == len(requests)


def left_streams(wire: Wire, left: tuple[list[bytes], int]) -> None:
    wire.leave_stream(*left)


def loads_over_grpc(wire: Wire, loads: list[tuple[Any, dict[str, str]] | None]) -> None:
    """Several at once; None unloads."""
    wire.rpcs(INFERENCE, [_load_over_grpc(load) for load in loads])


def _load_over_grpc(load: tuple[Any, dict[str, str]] | None) -> tuple[str, bytes]:
    if load is None:
        unload = schema().messages["RepositoryModelUnloadRequest"](model_name="spare")
        return "RepositoryModelUnload", unload.SerializeToString()
    config, files = load
    request = schema().messages["RepositoryModelLoadRequest"](model_name="spare")
    request.parameters["config"].string_param = json.dumps(config)
    for path, code in files.items():
        request.parameters[f"file:{path}"].bytes_param = code.encode()
    return "RepositoryModelLoad", request.SerializeToString()


def load_over_http(wire: Wire, load: tuple[Any, dict[str, str]]) -> None:
    config, files = load
    parameters = {f"file:{path}": base64.b64encode(code.encode()).decode() for path, code in files.items()}
    body = {"parameters": {"config": json.dumps(config), **parameters}}
    wire.http("POST", "/v2/repository/models/spare/load", json.dumps(body).encode(), {})
    wire.http("POST", "/v2/repository/models/spare/unload", b"", {})


def http_infer(wire: Wire, request: tuple[str, Any, bytes, str | None]) -> None:
    model, body, tail, length = request
    text = json.dumps(body).encode()
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    wire.http("POST", f"/v2/models/{model}/infer", text + (tail if headers else b""), headers)
    wire.http("POST", f"/v2/models/{model}/infer", text + tail, {"Inference-Header-Content-Length": str(len(text))})


def http_generate(wire: Wire, request: tuple[str, str, Any]) -> None:
    model, verb, body = request
    wire.http("POST", f"/v2/models/{model}/{verb}", json.dumps(body).encode(), {})


def http_anything(wire: Wire, request: tuple[str, str, bytes, str]) -> None:
    method, path, content, encoding = request
    wire.http(method, path, content, {"Content-Encoding": encoding} if encoding else {})


def left_http(wire: Wire, tokens: int) -> None:
    body = {"text_input": "Once", "parameters": {"max_new_tokens": tokens}}
    wire.leave_http("/v2/models/tiny/generate_stream", json.dumps(body).encode())


def any_bytes(wire: Wire, sent: tuple[bool, bytes, bytes]) -> None:
    to_grpc, head, data = sent
    wire.bytes_to(head + data, to_grpc=to_grpc)


LOADS = st.tuples(
    CONFIGS,
    st.dictionaries(st.sampled_from(["1/model.py", "2/model.py", "config.pbtxt", "../x", "1"]), CODES, max_size=2),
)
MODELS = st.sampled_from(sorted(INPUTS))
FAMILIES: list[tuple[Callable[[Wire, Any], None], st.SearchStrategy[Any]]] = [
    (any_rpc, CALLS),
    (one_infer, REQUESTS),
    (one_stream, st.lists(REQUESTS, max_size=4)),
    (left_streams, st.tuples(st.lists(REQUESTS, min_size=1, max_size=3), st.integers(0, 2))),
    (loads_over_grpc, st.lists(LOADS | st.none(), min_size=1, max_size=3)),
    (load_over_http, LOADS),
    (http_infer, st.tuples(MODELS, BODIES, st.binary(max_size=20), LENGTHS)),
    (
        http_generate,
        st.tuples(
            MODELS,
            st.sampled_from(["generate", "generate_stream", "infer"]),
            st.dictionaries(
                st.sampled_from(["IN", "TEXT", "id", "parameters", "text_input", "max_tokens", "stream", "stop_words"]),
                JSON | PARAMETERS | st.text(st.characters(), max_size=4),
                max_size=4,
            ),
        ),
    ),
    (
        http_anything,
        st.tuples(
            st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"]),
            PATHS,
            st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()),
            st.sampled_from(["", "", "gzip", "deflate", "br"]),
        ),
    ),
    (left_http, st.integers(1, 4)),
    (
        any_bytes,
        st.tuples(
            st.booleans(),
            st.sampled_from([b"", PREFACE, PREFACE + b"\0\0\0\4\0\0\0\0\0", b"POST /infer HTTP/1.1\r\n", b"GET /v2 "]),
            st.binary(max_size=60),
        ),
    ),
]


def send(wire: Wire, examples: int, number: int | None) -> int:
    """Send so many examples of every family; how many there were.

    Args:
        wire: to the server.
        examples: of each family.
        number: of the round; None sends the same each time.
    """
    return sum(_send(partial(family, wire), inputs, examples, number) for family, inputs in FAMILIES)


def _send(call: Callable[[Any], None], inputs: st.SearchStrategy[Any], examples: int, number: int | None) -> int:
    sent = 0

    @settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def one(value: Any) -> None:
        nonlocal sent
        sent += 1
        call(value)

    (one if number is None else seed(number)(one))()
    return sent


@pytest.mark.timeout(240 + 60 * MINUTES)
def test_the_server_survives_everything(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    wire.check_good("identity", LARGE)
    if MINUTES:
        end = time.monotonic() + 60 * MINUTES
        first = secrets.randbelow(2**32)
        sent = sum(send(wire, 3 * EXAMPLES, first + number) for number in range(WARM_UP_ROUNDS))
        before = wire.usage()
        for number in itertools.count(first + WARM_UP_ROUNDS):
            sent += send(wire, 3 * EXAMPLES, number)
            if time.monotonic() > end:
                break
    else:
        sent = send(wire, EXAMPLES // 3, None)
        before = wire.usage()
        sent += send(wire, EXAMPLES, None)
    after = wire.usage(lambda usage: usage.files <= before.files + FEW)
    wire.check_good("identity", LARGE)
    if MINUTES:
        with capsys.disabled():
            said = f"{sent} examples; before {before}, after {after}\n{dict(sorted(wire.seen.items()))}"
            sys.stdout.write(f"\n{said}\n")
    assert after.resident - before.resident < GROWTH_BYTES
    assert after.files <= before.files + FEW
    assert after.threads <= before.threads + FEW
