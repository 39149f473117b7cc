"""Model control by Triton's own HTTP clients, against the real server in explicit mode; and the other modes."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model

WITHIN_S = 60.0

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data * FACTOR)]))
        return out
"""
DOUBLE_CONFIG = """
backend: "python"
max_batch_size: 4
version_policy { all: {} }
input [{ name: "IN" data_type: TYPE_INT32 dims: [2] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [2] }]
"""


def write_double(repository: Path, name: str, *factors: int) -> None:
    """A python model; each version multiplies by its factor."""
    for version, factor in enumerate(factors, 1):
        folder = repository / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(DOUBLE.replace("FACTOR", str(factor)))
    (repository / name / "config.pbtxt").write_text(DOUBLE_CONFIG)


class Client:
    """Triton's client, the blocking or the asynchronous one, called in the same way."""

    def __init__(self, url: str, *, asynchronous: bool) -> None:
        self._runner = asyncio.Runner()
        address = url.removeprefix("http://")
        self._client = self._runner.run(self._make(address)) if asynchronous else triton.InferenceServerClient(address)

    async def _make(self, address: str) -> Any:
        return triton_aio.InferenceServerClient(address)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            if not inspect.isawaitable(result):
                return result

            async def wait() -> Any:
                return await result

            return self._runner.run(wait())

        return call

    def end(self) -> None:
        self.close()
        self._runner.close()

    def states(self) -> dict[str, str]:
        """State and reason by name and version."""
        rows = self.get_model_repository_index()
        return {
            f"{row['name']}:{row.get('version', '')}": " ".join(filter(None, [row.get("state"), row.get("reason")]))
            for row in rows
        }

    def times(self, model: str, version: str = "") -> list[int]:
        tensor = triton.InferInput("IN", [1, 2], "INT32")
        tensor.set_data_from_numpy(np.array([[3, 4]], np.int32))
        result = self.infer(model, [tensor], version)
        return list(result.as_numpy("OUT").flatten())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("control")
    build_tiny_model(add_model(root, "tiny"))
    build_tiny_model(add_model(root, "other"), "gpt2")
    write_double(root, "double", 2, 3)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    flags = ("--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "tiny")
    with ServerProcess(*flags) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(params=[False, True], ids=["http", "http.aio"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    made = Client(server.url, asynchronous=request.param)
    yield made
    for name in ("double", "other"):
        with suppress(InferenceServerException):
            made.unload_model(name)
    made.end()


def until(check: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.02)):
        if check():
            return
        pause.wait(0.02)
    raise AssertionError("it did not happen")


def test_health_and_metadata(client: Client) -> None:
    assert client.is_server_live() is True
    assert client.is_server_ready() is True
    assert client.is_model_ready("tiny") is True
    assert client.is_model_ready("tiny", "1") is True
    assert client.is_model_ready("double") is False
    metadata = client.get_server_metadata()
    assert metadata["name"] == "tengserve"
    assert {"model_repository", "binary_tensor_data", "statistics", "generate"} <= set(metadata["extensions"])
    model = client.get_model_metadata("tiny", "1")
    assert (model["name"], model["versions"], model["platform"]) == ("tiny", ["1"], "tengserve")
    assert {"name": "text_input", "datatype": "BYTES", "shape": [1]} in model["inputs"]


def test_a_python_model_from_the_load_to_the_unload(client: Client) -> None:
    client.load_model("double")
    assert client.is_model_ready("double", "2") is True
    assert client.times("double") == [9, 12]
    assert client.times("double", "1") == [6, 8]
    metadata = client.get_model_metadata("double")
    assert metadata == {
        "name": "double",
        "versions": ["2", "1"],
        "platform": "python",
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [-1, 2]}],
        "outputs": [{"name": "OUT", "datatype": "INT32", "shape": [-1, 2]}],
    }
    config = client.get_model_config("double", "1")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("double", "python", 4)
    assert config["input"][0]["dims"] == [2]
    assert config["version_policy"] == {"all": {}}
    (row,) = client.get_inference_statistics("double", "1")["model_stats"]
    assert (row["name"], row["version"], row["inference_count"], row["execution_count"]) == ("double", "1", 1, 1)
    assert row["inference_stats"]["success"]["count"] == 1
    assert row["inference_stats"]["success"]["ns"] > 0
    assert row["last_inference"] > 1_700_000_000_000
    (batch,) = row["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"], row["response_stats"]) == (1, 1, {})
    every = client.get_inference_statistics()["model_stats"]
    assert [(row["name"], row["version"]) for row in every] == [("double", "2"), ("double", "1"), ("tiny", "1")]
    client.unload_model("double", unload_dependents=True)
    until(lambda: client.states()["double:2"] == "UNAVAILABLE unloaded")
    assert client.is_model_ready("double") is False
    with pytest.raises(InferenceServerException, match="unload"):
        client.times("double")


def test_the_configuration_of_an_llm_tells_its_tensors(client: Client) -> None:
    config = client.get_model_config("tiny")
    assert (config["backend"], config["max_batch_size"]) == ("tengserve", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    text = next(row for row in config["input"] if row["name"] == "text_input")
    assert (text["data_type"], text["dims"], text["optional"]) == ("TYPE_STRING", [1], True)
    assert config["output"][0]["name"] == "text_output"
    (row,) = client.get_inference_statistics("tiny")["model_stats"]
    assert row["inference_stats"]["fail"] == {"count": 0, "ns": 0}


def test_the_index_is_that_of_the_disk(client: Client, repository: Path) -> None:
    write_double(repository, "late", 5)
    try:
        states = client.states()
        assert states["tiny:1"] == "READY"
        assert states["late:"] == ""
        client.load_model("late")
        assert client.states()["late:1"] == "READY"
        assert client.times("late") == [15, 20]
        (repository / "late" / "1" / "model.py").write_text("raise RuntimeError('no luck')")
        with pytest.raises(
            InferenceServerException, match=r"load failed for model 'late': version 1 is at UNAVAILABLE"
        ):
            client.load_model("late")
        # What was served still is.
        assert client.times("late") == [15, 20]
        client.unload_model("late")
        until(lambda: client.states()["late:1"] == "UNAVAILABLE unloaded")
        with pytest.raises(InferenceServerException, match="no luck") as error:
            client.load_model("late")
        assert error.value.status() == "400"
        assert "no luck" in client.states()["late:1"]
        assert client.is_server_ready() is True
        assert client.is_model_ready("late") is False
    finally:
        shutil.rmtree(repository / "late")
        client.unload_model("late")
    assert "late" not in " ".join(client.states())


def test_a_configuration_and_files_of_the_request(client: Client) -> None:
    config = json.dumps({"backend": "python", "max_batch_size": 2})
    with pytest.raises(InferenceServerException, match="requires a model config"):
        client.load_model("double", files={"file:1/model.py": b""})
    tensors = {"data_type": "TYPE_INT32", "dims": [2]}
    full = json.loads(config) | {"input": [{"name": "IN", **tensors}], "output": [{"name": "OUT", **tensors}]}
    code = DOUBLE.replace("FACTOR", "100").encode()
    client.load_model("double", config=json.dumps(full), files={"file:7/model.py": code})
    assert client.times("double") == [300, 400]
    assert client.states()["double:7"] == "READY"
    assert client.get_model_config("double")["max_batch_size"] == 2
    client.load_model("double")
    until(lambda: client.states().get("double:7") == "UNAVAILABLE unloaded")
    assert client.times("double") == [9, 12]
    for files in ({"file:../x": b""}, {"file:/x": b""}):
        with pytest.raises(InferenceServerException, match="must have a path in the model's folder"):
            client.load_model("double", config=config, files=files)


def test_an_llm_is_loaded_anew_without_a_failed_request(client: Client, server: ServerProcess) -> None:
    url = f"{server.url}/v2/models/tiny/generate"
    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=WITHIN_S) as http:
            while not stop.is_set():
                body = {"text_input": "Once", "parameters": {"max_new_tokens": 8}}
                answers.append(http.post(url, json=body).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(2):
            client.load_model("tiny")
        count = len(answers)
        until(lambda: len(answers) > count + 2)
    finally:
        stop.set()
        thread.join(WITHIN_S)
    assert set(answers) == {200}


def test_two_llms_and_what_is_not_there(client: Client) -> None:
    client.load_model("other")
    assert client.is_model_ready("other") is True
    with pytest.raises(InferenceServerException, match="failed to load 'nobody', failed to poll") as error:
        client.load_model("nobody")
    assert error.value.status() == "500"
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
        client.unload_model("nobody")
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody' is not found"):
        client.get_model_config("nobody")
    with pytest.raises(InferenceServerException, match="requested model 'nobody' is not available"):
        client.get_inference_statistics("nobody")


def test_log_settings(client: Client) -> None:
    before = client.get_log_settings()
    assert (before["log_info"], before["log_verbose_level"]) == (True, 0)
    assert client.update_log_settings({"log_verbose_level": 1, "log_warning": False})["log_verbose_level"] == 1
    assert client.get_log_settings()["log_warning"] is False
    assert client.update_log_settings({"log_verbose_level": 0, "log_warning": True}) == before
    with pytest.raises(InferenceServerException, match="log file location can not be updated"):
        client.update_log_settings({"log_file": "x"})


def test_trace_settings(client: Client) -> None:
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings(settings={"trace_rate": "7"})["trace_rate"] == "7"
    assert client.update_trace_settings("tiny", {"trace_rate": "9"})["trace_rate"] == "9"
    assert client.get_trace_settings()["trace_rate"] == "7"
    assert client.get_trace_settings("tiny")["trace_rate"] == "9"
    client.update_trace_settings("tiny", {"trace_rate": None})
    assert client.update_trace_settings(settings={"trace_rate": None})["trace_rate"] == "1000"
    with pytest.raises(InferenceServerException, match="writes no traces"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
        client.get_trace_settings("nobody")


def test_shared_memory_is_refused(client: Client) -> None:
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    client.unregister_system_shared_memory("region")
    client.unregister_cuda_shared_memory("region")
    with pytest.raises(InferenceServerException, match="serves no shared memory"):
        client.register_system_shared_memory("region", "/key", 64)
    with pytest.raises(InferenceServerException, match="serves no shared memory"):
        client.register_cuda_shared_memory("region", b"handle", 0, 64)
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'region'"):
        client.get_system_shared_memory_status("region")


def test_explicit_without_a_model_is_ready_to_load_one(repository: Path) -> None:
    with ServerProcess("--model-repository", str(repository), "--model-control-mode", "explicit") as server:
        url = server.wait_until_ready()
        server.wait_for(re.compile("has no model yet"), "stdout")
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
        client = Client(url, asynchronous=False)
        assert set(client.states().values()) == {""}
        client.load_model("double")
        assert client.times("double") == [9, 12]
        client.unload_model("double")
        until(lambda: client.states()["double:1"] == "UNAVAILABLE unloaded")
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
        client.end()


def test_none_refuses_requests(tiny_server: ServerProcess) -> None:
    client = Client(tiny_server.url, asynchronous=False)
    text = "explicit model load / unload is not allowed if polling is enabled"
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match=text) as error:
            call("tiny")
        assert error.value.status() == "503"
    assert client.states() == {"tiny:1": "READY"}
    client.end()


def test_poll_follows_the_disk(tmp_path: Path) -> None:
    write_double(tmp_path, "first", 2)
    flags = ("--model-control-mode", "poll", "--repository-poll-secs", "1")
    with ServerProcess("--model-repository", str(tmp_path), *flags) as server:
        client = Client(server.wait_until_ready(), asynchronous=False)
        write_double(tmp_path, "second", 5)
        until(lambda: client.states().get("second:1") == "READY")
        assert client.times("second") == [15, 20]
        write_double(tmp_path, "second", 6)
        until(lambda: client.times("second") == [18, 24])
        shutil.rmtree(tmp_path / "second")
        until(lambda: client.states() == {"first:1": "READY"})
        with pytest.raises(InferenceServerException, match="if polling is enabled"):
            client.load_model("first")
        client.end()
