"""tritonclient.grpc and grpc.aio against a server, in a process of their own: they cannot be imported beside kserve.

`python triton_grpc.py sync|aio ADDRESS [EXPECTED]` runs every public method of that client against models such as those
of tensor_models.py, asserts what comes back, and prints the names of the methods that it called. `methods sync|aio`
prints those that there are; `llm|llm-aio ADDRESS` asks the model "tiny".
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

WAIT_S = 20.0
EXPECTED: dict[str, Any] = {
    "version": "1.2.3",
    "models": ["simple", "broken", "new"],
    "config": '{"max_batch_size": 4}',
    "files": {"file:1/model.py": "eA=="},
    "missing": "NOT_FOUND",
    "temperature": 0.7,
}
"""What differs between the servers that are tested; a third argument, JSON, replaces some of it."""
A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 2, np.int32)


class Recorded:
    """A client that notes which of its methods are called."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.client, name)


class Plugin(triton.InferenceServerClientPlugin):
    """Adds nothing but a header."""

    def __call__(self, request: Any) -> None:
        request.headers["x-plugin"] = "yes"


def tensor(name: str, data: np.ndarray[Any, Any], datatype: str, kind: Any = triton) -> Any:
    found = kind.InferInput(name, list(data.shape), datatype)
    found.set_data_from_numpy(data)
    return found


def pair(kind: Any = triton) -> list[Any]:
    return [tensor("INPUT0", A, "INT32", kind), tensor("INPUT1", B, "INT32", kind)]


def number(*values: int) -> list[Any]:
    return [tensor("IN", np.array(values, np.int32), "INT32")]


def check_sums(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    assert result.as_numpy("OUTPUT0").dtype == np.int32
    assert result.as_numpy("nothing") is None
    assert result.get_response().model_name == "simple"
    assert result.get_output("OUTPUT1").datatype == "INT32"


def check_error(error: InferenceServerException, status: str, message: str) -> None:
    assert error.status() == f"StatusCode.{status}", error.status()
    assert message in error.message(), error.message()


def refused(call: Any) -> InferenceServerException:
    try:
        call()
    except InferenceServerException as error:
        return error
    raise AssertionError("nothing was raised")


def check_metadata(metadata: Any, model: Any, config: Any, statistics: Any, index: Any) -> None:
    assert metadata["name"] == "tengserve"
    assert metadata["version"] == EXPECTED["version"]
    assert model["name"] == "simple"
    assert model["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
    assert config["config"]["max_batch_size"] == 8
    assert config["config"]["input"][0]["name"] == "INPUT0"
    assert int(statistics["model_stats"][0]["inference_count"]) > 0
    assert [row["name"] for row in index["models"]] == EXPECTED["models"]


def check_settings(trace: Any, changed_trace: Any, log: Any, changed_log: Any) -> None:
    assert list(trace["settings"]["trace_level"]["value"]) == ["OFF"]
    assert list(changed_trace["settings"]["trace_rate"]["value"]) == ["7"]
    assert log["settings"]["log_info"] == {"bool_param": True}
    assert changed_log["settings"]["log_verbose_level"] == {"uint32_param": 1}


def sync(address: str) -> set[str]:
    with triton.InferenceServerClient(address) as real:
        client = Recorded(real)
        client.register_plugin(Plugin())
        assert isinstance(client.plugin(), Plugin)
        assert client.is_server_live() is True
        assert client.is_server_ready() is True
        assert client.is_model_ready("simple") is True
        assert client.is_model_ready("simple", "1") is True
        assert client.is_model_ready("nobody") is False
        check_sums(client.infer("simple", pair()))
        check_metadata(
            client.get_server_metadata(as_json=True),
            client.get_model_metadata("simple", as_json=True),
            client.get_model_config("simple", as_json=True),
            client.get_inference_statistics("simple", as_json=True),
            client.get_model_repository_index(as_json=True),
        )
        check_settings(
            client.get_trace_settings(as_json=True),
            client.update_trace_settings(settings={"trace_rate": "7"}, as_json=True),
            client.get_log_settings(as_json=True),
            client.update_log_settings({"log_verbose_level": 1}, as_json=True),
        )
        client.load_model("other", config=EXPECTED["config"], files=EXPECTED["files"])
        client.unload_model("other", unload_dependents=True)
        check_error(refused(lambda: client.load_model("missing")), EXPECTED["missing"], "failed to load 'missing'")
        assert not client.get_system_shared_memory_status().regions
        assert not client.get_cuda_shared_memory_status().regions
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        error = refused(lambda: client.register_system_shared_memory("region", "/key", 8))
        check_error(error, "UNIMPLEMENTED", "no shared memory")
        error = refused(lambda: client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 8))
        check_error(error, "UNIMPLEMENTED", "no shared memory")
        client.unregister_plugin()
        _sync_infer(client)
        _sync_streams(client)
        client.close()
        return client.called


def _sync_infer(client: Any) -> None:
    for compression in (None, "gzip", "deflate"):
        result = client.infer("simple", pair(), request_id="r", compression_algorithm=compression)
        check_sums(result)
        assert result.get_response().id == "r"
    only = [triton.InferRequestedOutput("OUTPUT1"), triton.InferRequestedOutput("OUTPUT0", class_count=2)]
    result = client.infer("simple", pair(), model_version="1", outputs=only)
    assert result.as_numpy("OUTPUT0").tolist() == [[b"17:15", b"16:14"]]
    texts = np.array([["zwölf".encode(), b"\x00"]], np.object_)
    halves = np.array([0.5, -2], np.float16)
    parameters = {"temperature": 0.7, "flag": True, "count": -3, "text": "t"}
    result = client.infer(
        "echo",
        [tensor("T", texts, "BYTES"), tensor("H", halves, "FP16")],
        parameters=parameters,
        sequence_id="s",
        sequence_start=True,
        priority=2,
        timeout=1_000_000,
    )
    assert result.as_numpy("T").tolist() == texts.tolist()
    np.testing.assert_array_equal(result.as_numpy("H"), halves)
    echoed = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in _parameters(result).items()}
    assert echoed == {**parameters, "temperature": EXPECTED["temperature"]}
    check_error(refused(lambda: client.infer("nobody", number(1))), "NOT_FOUND", "unknown model: 'nobody'")
    check_error(refused(lambda: client.infer("simple", pair(), model_version="9")), "NOT_FOUND", "unknown model")
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer("simple", pair(), lambda result, error: done.put((result, error)))
    result, error = done.get(timeout=WAIT_S)
    assert error is None
    check_sums(result)
    context = client.async_infer("gated", number(1), lambda result, error: done.put((result, error)))
    context.cancel()
    _, error = done.get(timeout=WAIT_S)
    check_error(error, "CANCELLED", "Locally cancelled by application!")
    error = refused(lambda: client.infer("gated", number(1), client_timeout=0.2))
    check_error(error, "DEADLINE_EXCEEDED", "Deadline Exceeded")


def _sync_streams(client: Any) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: done.put((result, error)))
    client.async_stream_infer("repeat", number(4, 5), request_id="a", enable_empty_final_response=True)
    answers = [done.get(timeout=WAIT_S) for _ in range(3)]
    assert [error for _, error in answers] == [None] * 3
    assert [result.as_numpy("OUT").tolist() for result, _ in answers[:2]] == [[4], [5]]
    assert [_parameters(result)["triton_final_response"].bool_param for result, _ in answers] == [False, False, True]
    client.async_stream_infer("simple", pair(), request_id="b")
    check_sums(done.get(timeout=WAIT_S)[0])
    client.async_stream_infer("nobody", number(1))
    error = done.get(timeout=WAIT_S)[1]
    assert error.status() is None
    assert "unknown model: 'nobody'" in error.message()
    client.async_stream_infer("repeat", number(6))
    client.stop_stream()  # The client closes its side, and what is open is answered first.
    assert done.get(timeout=WAIT_S)[0].as_numpy("OUT").tolist() == [6]
    assert done.empty()
    client.start_stream(lambda result, error: done.put((result, error)))
    client.async_stream_infer("endless", number(7))
    assert done.get(timeout=WAIT_S)[0].as_numpy("IN").tolist() == [7]
    client.stop_stream(cancel_requests=True)
    error = None
    while error is None:
        _, error = done.get(timeout=WAIT_S)
    check_error(error, "CANCELLED", "Locally cancelled by application!")


def _parameters(result: Any) -> Any:
    return result.get_response().parameters


async def refused_aio(call: Any) -> InferenceServerException:
    try:
        await call
    except InferenceServerException as error:
        return error
    raise AssertionError("nothing was raised")


async def aio(address: str) -> set[str]:
    async with triton_aio.InferenceServerClient(address) as real:
        client = Recorded(real)
        client.register_plugin(Plugin())
        assert isinstance(client.plugin(), Plugin)
        assert await client.is_server_live() is True
        assert await client.is_server_ready() is True
        assert await client.is_model_ready("simple") is True
        assert await client.is_model_ready("nobody") is False
        check_sums(await client.infer("simple", pair(triton_aio)))
        check_metadata(
            await client.get_server_metadata(as_json=True),
            await client.get_model_metadata("simple", as_json=True),
            await client.get_model_config("simple", as_json=True),
            await client.get_inference_statistics("simple", as_json=True),
            await client.get_model_repository_index(as_json=True),
        )
        check_settings(
            await client.get_trace_settings(as_json=True),
            await client.update_trace_settings(settings={"trace_rate": "7"}, as_json=True),
            await client.get_log_settings(as_json=True),
            await client.update_log_settings({"log_verbose_level": 1}, as_json=True),
        )
        await client.load_model("other", config=EXPECTED["config"], files=EXPECTED["files"])
        await client.unload_model("other")
        check_error(await refused_aio(client.load_model("missing")), EXPECTED["missing"], "failed to load 'missing'")
        assert not (await client.get_system_shared_memory_status()).regions
        assert not (await client.get_cuda_shared_memory_status()).regions
        await client.unregister_system_shared_memory()
        await client.unregister_cuda_shared_memory()
        error = await refused_aio(client.register_system_shared_memory("region", "/key", 8))
        check_error(error, "UNIMPLEMENTED", "no shared memory")
        error = await refused_aio(client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 8))
        check_error(error, "UNIMPLEMENTED", "no shared memory")
        client.unregister_plugin()
        check_sums(await client.infer("simple", pair(triton_aio)))
        check_error(await refused_aio(client.infer("nobody", pair())), "NOT_FOUND", "unknown model: 'nobody'")
        error = await refused_aio(client.infer("gated", number(1), client_timeout=0.2))
        check_error(error, "DEADLINE_EXCEEDED", "Deadline Exceeded")
        await _aio_stream(client)
        await client.close()
        return client.called


async def _aio_stream(client: Any) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat", "inputs": number(4, 5), "request_id": "a"}
        yield {"model_name": "simple", "inputs": pair(), "request_id": "b"}

    answers = [answer async for answer in client.stream_infer(requests())]
    assert [error for _, error in answers] == [None] * 3
    repeated = [result for result, _ in answers if result.get_response().id == "a"]
    assert [result.as_numpy("OUT").tolist() for result in repeated] == [[4], [5]]
    check_sums(next(result for result, _ in answers if result.get_response().id == "b"))

    async def endless() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "endless", "inputs": number(7)}

    responses = client.stream_infer(endless())
    async for result, _ in responses:
        assert result.as_numpy("IN").tolist() == [7]
        break
    responses.cancel()


def prompt(kind: Any = triton) -> list[Any]:
    return [tensor("text_input", np.array([b"Once"], np.object_), "BYTES", kind)]


GREEDY = {"max_tokens": 8, "temperature": 0.0}


def llm(address: str) -> None:
    """The model "tiny" as users of Triton's LLM backends ask it: one answer, a stream, and a stream that is left."""
    with triton.InferenceServerClient(address) as client:
        asked = {**GREEDY, "exclude_input_in_output": True}
        result = client.infer("tiny", prompt(), parameters=asked, request_id="a")
        whole = result.as_numpy("text_output").tolist()[0]
        outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
        result = client.infer("tiny", prompt(), parameters=asked, outputs=outputs)
        assert result.as_numpy("num_output_tokens").tolist() == [8]
        assert result.as_numpy("text_output").tolist() == [whole]
        done: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: done.put((result, error)))
        client.async_stream_infer("tiny", prompt(), parameters={**GREEDY, "stream": True}, request_id="b")
        pieces = []
        final = False
        while not final:
            result, error = done.get(timeout=WAIT_S)
            assert error is None, error
            final = _parameters(result)["triton_final_response"].bool_param
            pieces.append(result.as_numpy("text_output").tolist()[0])
        assert b"".join(pieces) == whole
        client.async_stream_infer("tiny", prompt(), parameters={**GREEDY, "stream": True, "max_tokens": 100})
        assert done.get(timeout=WAIT_S)[1] is None
        client.stop_stream(cancel_requests=True)


async def llm_aio(address: str) -> None:
    """The same with the other client."""
    async with triton_aio.InferenceServerClient(address) as client:
        asked = {**GREEDY, "exclude_input_in_output": True}
        result = await client.infer("tiny", prompt(triton_aio), parameters=asked)
        whole = result.as_numpy("text_output").tolist()[0]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "tiny", "inputs": prompt(triton_aio), "parameters": {**GREEDY, "stream": True}}

        answers = [answer async for answer in client.stream_infer(requests())]
        assert [error for _, error in answers] == [None] * len(answers)
        assert b"".join(result.as_numpy("text_output").tolist()[0] for result, _ in answers) == whole


def methods(kind: str) -> set[str]:
    """The public methods of a client, of "sync" or "aio"."""
    client = (triton if kind == "sync" else triton_aio).InferenceServerClient
    return {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}


if __name__ == "__main__":
    match sys.argv[1:]:
        case "sync" | "aio" as kind, address, *other:
            EXPECTED |= json.loads(other[0]) if other else {}
            EXPECTED["files"] = {path: base64.b64decode(data) for path, data in EXPECTED["files"].items()}
            names = sync(address) if kind == "sync" else asyncio.run(aio(address))
        case "llm", address:
            llm(address)
            names = set()
        case "llm-aio", address:
            asyncio.run(llm_aio(address))
            names = set()
        case "methods", kind:
            names = methods(kind)
        case _:
            raise SystemExit(__doc__)
    sys.stdout.write(" ".join(sorted(names)))
