"""Every RPC but the stream, health and reflection, as bytes on the wire say it; and the server's limits and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from support.grpc_client import Grpc, Message, infer_request, ints, raw, running
from tengserve_adapter.grpc.schema import HEALTH, INFERENCE, REFLECTIONS, message_class, schema
from tengserve_adapter.grpc.settings import GrpcSettings, TlsFiles
from tengserve_adapter.grpc.status import CODES, status_of
from tengserve_adapter.listener import ListenError
from tengserve_backend import errors
from tengserve_backend.errors import ConfigurationError, ModelExecutionError
from tengserve_backend.inference import Datatype, SequenceFlags

WAIT_S = 20.0


@pytest.fixture
async def server() -> AsyncIterator[Grpc]:
    async with running() as server:
        yield server


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details() or ""


async def test_health_and_readiness(server: Grpc) -> None:
    assert (await server.call("ServerLive")).live is True
    assert (await server.call("ServerReady")).ready is True
    assert (await server.call("Check", HEALTH)).status == 1
    assert (await server.call("Check", HEALTH, service=INFERENCE)).status == 1
    assert await refusal(server.call("Check", HEALTH, service="other")) == (
        grpc.StatusCode.NOT_FOUND,
        "unknown service",
    )
    ready = [(await server.call("ModelReady", name=name)).ready for name in ("echo", "slow", "loading", "nobody")]
    assert ready == [True, False, False, False]
    assert (await server.call("ModelReady", name="echo", version="2")).ready is False


async def test_a_stopping_server_is_live_and_not_ready(server: Grpc) -> None:
    server.draining = True
    assert (await server.call("ServerLive")).live is True
    assert (await server.call("ServerReady")).ready is False
    assert (await server.call("ModelReady", name="echo")).ready is False
    assert (await server.call("Check", HEALTH)).status == 2
    code, message = await refusal(server.send("ModelInfer", ints("echo", "a", 1)))
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "The service is stopping and takes no new requests.")


async def test_a_watch_tells_each_change_and_ends_with_the_server(server: Grpc) -> None:
    watch, unknown = server.watch(INFERENCE), server.watch("other")
    assert (await watch.read()).status == 1
    assert (await unknown.read()).status == 3
    server.draining = True
    assert (await watch.read()).status == 2
    await server.server.stop(30.0)
    for each in (watch, unknown):
        code, _ = await refusal(each.read())
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_metadata(server: Grpc) -> None:
    metadata = await server.call("ServerMetadata")
    assert (metadata.name, metadata.version) == ("tengserve", "1.2.3")
    model = await server.call("ModelMetadata", name="simple")
    assert (model.name, model.platform, list(model.versions)) == ("simple", "python", ["1"])
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert [each.name for each in model.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert (await refusal(server.call("ModelMetadata", name="nobody")))[0] is grpc.StatusCode.NOT_FOUND
    assert (await refusal(server.call("ModelMetadata", name="loading")))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["wrong", "-1", "1.0", "\u0661", " 1"])
async def test_a_version_is_a_number(server: Grpc, version: str) -> None:
    calls = [
        server.call(method, name="echo", version=version)
        for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    ]
    for call in [*calls, server.call("ModelInfer", model_name="echo", model_version=version)]:
        code, message = await refusal(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"failed to get model version from specified version string '{version}'")


async def test_configuration_and_statistics(server: Grpc) -> None:
    config = (await server.call("ModelConfig", name="simple")).config
    assert (config.name, config.backend, config.max_batch_size) == ("simple", "python", 8)
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [("INPUT0", 8, [16])]
    assert config.version_policy.latest.num_versions == 1
    assert config.dynamic_batching.priority_queue_policy[1].max_queue_size == 3
    assert config.parameters["key"].string_value == "value"
    (row,) = (await server.call("ModelStatistics", name="simple")).model_stats
    assert (row.name, row.version, row.inference_count, row.execution_count) == ("simple", "1", 6, 3)
    assert (row.inference_stats.success.count, row.inference_stats.success.ns) == (3, 4_000_000_000)
    assert await refusal(server.call("ModelStatistics", name="nobody")) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "requested model 'nobody' is not available",
    )


async def test_repository(server: Grpc) -> None:
    rows = (await server.call("RepositoryIndex")).models
    assert [(row.name, row.version, row.state, row.reason) for row in rows] == [
        ("simple", "1", "READY", ""),
        ("broken", "1", "UNAVAILABLE", "no weights"),
        ("new", "", "", ""),
    ]
    assert len((await server.call("RepositoryIndex", ready=True)).models) == 1
    parameters = {"config": {"string_param": '{"max_batch_size": 4}'}, "file:1/model.py": {"bytes_param": b"\x00x"}}
    await server.call("RepositoryModelLoad", model_name="simple", parameters=parameters)
    await server.call(
        "RepositoryModelUnload", model_name="simple", parameters={"unload_dependents": {"bool_param": True}}
    )
    await server.call("RepositoryModelUnload", model_name="echo")
    assert server.control.told == [
        ("load", "simple", {"max_batch_size": 4}, {"1/model.py": b"\x00x"}),
        ("unload", "simple", True),
        ("unload", "echo", False),
    ]


@pytest.mark.parametrize(
    ("method", "fields", "code"),
    [
        ("RepositoryIndex", {"repository_name": "x"}, grpc.StatusCode.UNIMPLEMENTED),
        ("RepositoryModelLoad", {"model_name": "missing"}, grpc.StatusCode.NOT_FOUND),
        ("RepositoryModelLoad", {"parameters": {"config": {"int64_param": 1}}}, grpc.StatusCode.INVALID_ARGUMENT),
        ("RepositoryModelLoad", {"parameters": {"other": {"bool_param": True}}}, grpc.StatusCode.INVALID_ARGUMENT),
        ("RepositoryModelUnload", {"parameters": {"x": {"bool_param": True}}}, grpc.StatusCode.INVALID_ARGUMENT),
        ("SystemSharedMemoryStatus", {"name": "x"}, grpc.StatusCode.NOT_FOUND),
        ("SystemSharedMemoryRegister", {"name": "x", "byte_size": 8}, grpc.StatusCode.UNIMPLEMENTED),
        ("CudaSharedMemoryRegister", {"name": "x", "byte_size": 8}, grpc.StatusCode.UNIMPLEMENTED),
        ("LogSettings", {"settings": {"log_info": {}}}, grpc.StatusCode.INVALID_ARGUMENT),
        ("LogSettings", {"settings": {"log_file": {"string_param": "x"}}}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_not_served_is_refused(
    server: Grpc, method: str, fields: dict[str, object], code: grpc.StatusCode
) -> None:
    assert (await refusal(server.call(method, **fields)))[0] is code
    assert server.control.told == []


async def test_shared_memory_is_empty(server: Grpc) -> None:
    for kind in ("System", "Cuda"):
        assert len((await server.call(f"{kind}SharedMemoryStatus")).regions) == 0
        await server.call(f"{kind}SharedMemoryUnregister")
        await server.call(f"{kind}SharedMemoryUnregister", name="x")


async def test_settings(server: Grpc) -> None:
    log = (await server.call("LogSettings")).settings
    assert log["log_info"].bool_param is True
    assert log["log_verbose_level"].uint32_param == 0
    changed = {"log_info": {"bool_param": False}, "log_verbose_level": {"uint32_param": 2}}
    log = (await server.call("LogSettings", settings=changed)).settings
    assert (log["log_info"].bool_param, log["log_verbose_level"].uint32_param) == (False, 2)
    assert log["log_format"].string_param == "default"
    trace = (await server.call("TraceSetting", settings={"trace_rate": {"value": ["5"]}, "trace_level": {}})).settings
    assert {name: list(setting.value) for name, setting in trace.items()} == {
        "trace_rate": ["5"],
        "trace_level": ["default"],
    }


@pytest.mark.parametrize("datatype", list(Datatype))
async def test_raw_tensors_of_every_datatype(server: Grpc, datatype: Datatype) -> None:
    size = datatype.itemsize
    data = b"\x02\0\0\0hi\0\0\0\0" if size is None else bytes([0, 1] if datatype is Datatype.BOOL else range(2 * size))
    response = await server.send("ModelInfer", raw(infer_request("echo", "a"), "X", datatype.value, [2, 1], data))
    assert (response.id, response.model_name, response.model_version) == ("a", "echo", "1")
    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("X", datatype.value, [2, 1])
    ]
    assert list(response.raw_output_contents) == [data]


@pytest.mark.parametrize(
    ("datatype", "contents", "elements"),
    [
        ("BOOL", {"bool_contents": [True, False]}, [True, False]),
        ("INT8", {"int_contents": [-128, 127]}, [-128, 127]),
        ("INT16", {"int_contents": [-32768, 32767]}, [-32768, 32767]),
        ("INT32", {"int_contents": [-(2**31), 2**31 - 1]}, [-(2**31), 2**31 - 1]),
        ("INT64", {"int64_contents": [-(2**63), 2**63 - 1]}, [-(2**63), 2**63 - 1]),
        ("UINT8", {"uint_contents": [0, 255]}, [0, 255]),
        ("UINT16", {"uint_contents": [0, 65535]}, [0, 65535]),
        ("UINT32", {"uint_contents": [0, 2**32 - 1]}, [0, 2**32 - 1]),
        ("UINT64", {"uint64_contents": [0, 2**64 - 1]}, [0, 2**64 - 1]),
        ("FP32", {"fp32_contents": [0.5, -1.25]}, [0.5, -1.25]),
        ("FP64", {"fp64_contents": [0.1, -1e300]}, [0.1, -1e300]),
    ],
)
async def test_typed_tensors_are_taken_and_answered_raw(
    server: Grpc, datatype: str, contents: dict[str, object], elements: list[object]
) -> None:
    tensor = {"name": "X", "datatype": datatype, "shape": [2], "contents": contents}
    response = await server.send("ModelInfer", infer_request("echo", inputs=[tensor]))
    (content,) = response.raw_output_contents
    assert np.frombuffer(content, Datatype[datatype].dtype).tolist() == elements
    assert not response.outputs[0].HasField("contents")


async def test_typed_texts_are_taken(server: Grpc) -> None:
    tensor = {"name": "X", "datatype": "BYTES", "shape": [2], "contents": {"bytes_contents": [b"a\xff", b""]}}
    response = await server.send("ModelInfer", infer_request("echo", inputs=[tensor]))
    assert list(response.raw_output_contents) == [b"\x02\0\0\0a\xff\0\0\0\0"]


def typed(datatype: str, shape: list[int], **contents: list[object]) -> dict[str, object]:
    return {"name": "X", "datatype": datatype, "shape": shape, "contents": contents}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"inputs": [typed("FP16", [1])]}, "input 'X' of FP16 must come in raw_input_contents"),
        ({"inputs": [typed("INT8", [1], int_contents=[128])]}, "must be INT8, so in [-128, 127]"),
        ({"inputs": [typed("INT32", [2], int_contents=[1])]}, "must have 2 elements in int_contents"),
        ({"inputs": [typed("INT32", [1], int64_contents=[1])]}, "must come in int_contents, got 1 elements in int64"),
        ({"inputs": [typed("INT32", [-1], int_contents=[1])]}, "none negative"),
        ({"inputs": [typed("TEXT", [1])]}, "datatype of input 'X' must be one of BOOL"),
        ({"inputs": [typed("INT32", [0]), typed("INT32", [0])]}, "input 'X' already exists in request"),
        (
            {"inputs": [typed("INT32", [1], int_contents=[1])], "raw_input_contents": [b"\0\0\0\0"]},
            "contents field must not be specified when using raw_input_contents for 'X' for model 'echo'",
        ),
        (
            {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1]}], "raw_input_contents": [b"\0" * 4] * 2},
            "raw_input_contents must have one entry for each of the 1 inputs, got 2",
        ),
        (
            {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1]}], "raw_input_contents": [b"\0" * 3]},
            "input 'X' must have 4 bytes for shape [1] of INT32, got 3",
        ),
        ({"outputs": [{"name": "Y"}, {"name": "Y"}]}, "output 'Y' already exists in request"),
        ({"outputs": [{"name": "Y", "parameters": {"classification": {"bool_param": True}}}]}, "unsigned integer"),
        ({"parameters": {"x": {}}}, "parameter 'x' must have one of bool_param"),
        ({"parameters": {"x": {"double_param": float("nan")}}}, "parameter 'x' must be a finite number"),
        ({"parameters": {"triton_x": {"bool_param": True}}}, "keys starting with 'triton_' are reserved"),
        ({"parameters": {"priority": {"string_param": "high"}}}, "parameter 'priority' must be an unsigned integer"),
    ],
)
async def test_what_breaks_the_protocol_is_refused(server: Grpc, fields: dict[str, object], complaint: str) -> None:
    code, message = await refusal(server.send("ModelInfer", infer_request("echo", **fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in message
    assert not server.models.models["echo"].requests


async def test_shared_memory_tensors_are_refused(server: Grpc) -> None:
    region = {"shared_memory_region": {"string_param": "r"}}
    tensor = {"name": "X", "datatype": "INT32", "shape": [1], "parameters": region}
    for fields in ({"inputs": [tensor]}, {"outputs": [{"name": "Y", "parameters": region}]}):
        code, _ = await refusal(server.send("ModelInfer", infer_request("echo", **fields)))
        assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unknown_output_is_refused(server: Grpc) -> None:
    code, message = await refusal(server.send("ModelInfer", infer_request("simple", outputs=[{"name": "Y"}])))
    assert (code, message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "unexpected inference output 'Y' for model 'simple'",
    )


async def test_parameters_of_every_kind_reach_the_model_and_come_back(server: Grpc) -> None:
    parameters = {
        "flag": {"bool_param": True},
        "small": {"int64_param": -(2**63)},
        "large": {"uint64_param": 2**64 - 1},
        "text": {"string_param": "zwölf"},
        "fraction": {"double_param": 0.7},
    }
    meaning = {
        "priority": {"uint64_param": 2},
        "timeout": {"int64_param": 5_000_000},
        "sequence_id": {"int64_param": 7},
        "sequence_start": {"bool_param": True},
        "sequence_end": {"bool_param": False},
    }
    response = await server.send("ModelInfer", infer_request("echo", "r", parameters={**parameters, **meaning}))
    kinds = {name: value.WhichOneof("parameter_choice") for name, value in response.parameters.items()}
    assert kinds == {name: next(iter(value)) for name, value in parameters.items()}
    (request,) = server.models.models["echo"].requests
    assert request.parameters == {name: next(iter(value.values())) for name, value in parameters.items()}
    assert (request.priority, request.timeout_us) == (2, 5_000_000)
    assert request.sequence == SequenceFlags(7, start=True, end=False)


async def test_requested_outputs_and_classes(server: Grpc) -> None:
    request = infer_request("simple", outputs=[{"name": "OUTPUT1"}])
    for name in ("INPUT0", "INPUT1"):
        raw(request, name, "INT32", [1, 2], np.array([3, 5], "<i4").tobytes())
    response = await server.send("ModelInfer", request)
    assert [each.name for each in response.outputs] == ["OUTPUT1"]
    assert list(response.raw_output_contents) == [bytes(8)]
    del request.outputs[:]
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    response = await server.send("ModelInfer", request)
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [1, 1])
    assert response.raw_output_contents[0][4:] == b"10:1:one"


async def test_a_decoupled_model_answers_in_one_response_unless_the_server_is_strict(server: Grpc) -> None:
    response = await server.send("ModelInfer", ints("repeat", "a", 4, 5, 6))
    assert np.frombuffer(response.raw_output_contents[0], "<i4").tolist() == [4, 5, 6]
    async with running(GrpcSettings(port=0, strict_decoupled=True)) as strict:
        code, message = await refusal(strict.send("ModelInfer", ints("repeat", "a", 4)))
    assert (code, message) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


async def test_big_tensors_pass_and_bigger_messages_are_refused(server: Grpc) -> None:
    data = np.arange(3 * 1024 * 1024, dtype="<i4").tobytes()
    response = await server.send("ModelInfer", raw(infer_request("echo"), "X", "INT32", [len(data) // 4], data))
    assert response.raw_output_contents[0] == data
    async with running(GrpcSettings(port=0, max_message_bytes=1024)) as small:
        request = raw(infer_request("echo"), "X", "UINT8", [2048], bytes(2048))
        assert (await refusal(small.send("ModelInfer", request)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_compressed_message_is_as_big_as_what_it_holds() -> None:
    request = raw(infer_request("echo"), "X", "UINT8", [100_000], bytes(100_000)).SerializeToString()
    async with running(GrpcSettings(port=0, max_message_bytes=50_000)) as server:
        call = server.unary("ModelInfer")(request, compression=grpc.Compression.Gzip)
        assert (await refusal(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with running() as server:
        call = server.unary("ModelInfer")(request, compression=grpc.Compression.Gzip)
        assert list((await call).raw_output_contents) == [bytes(100_000)]


async def test_a_message_of_countless_parts_is_refused_before_it_takes_memory(server: Grpc) -> None:
    request = infer_request("echo")
    parameters = request.inputs.add(name="X", datatype="INT32").parameters
    for number in range(20_000):
        parameters[str(number)].bool_param = True
    settings = message_class(schema().service(INFERENCE).methods_by_name["TraceSetting"].input_type)()
    settings.settings["x"].value.extend([""] * 20_000)
    for method, sent in (("ModelInfer", b"\x2a\x00" * 1_000_000), ("ModelInfer", request), ("TraceSetting", settings)):
        code, message = await refusal(server.send(method, sent))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 16384 fields" in message


async def test_a_message_of_countless_elements_is_taken(server: Grpc) -> None:
    tensor = {"name": "X", "datatype": "BYTES", "shape": [20_000], "contents": {"bytes_contents": [b"a"] * 20_000}}
    response = await server.send("ModelInfer", infer_request("echo", inputs=[tensor]))
    assert response.raw_output_contents[0] == b"\1\0\0\0a" * 20_000


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x2a\x05a", b"\x0b" * 40_000, b"\x3a\xff\xff\xff\xff\x0f" + bytes(99)])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelConfig"])
async def test_what_is_no_message_is_refused(server: Grpc, method: str, data: bytes) -> None:
    assert (await refusal(server.send(method, data)))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(server: Grpc) -> None:
    call = server.channel.unary_unary(f"/{INFERENCE}/Nothing")
    assert (await refusal(call(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_cancelled_call_cancels_its_request(server: Grpc) -> None:
    gated = server.models.models["gated"]
    call = server.unary("ModelInfer")(ints("gated", "a", 1))
    assert await asyncio.wait_for(gated.began.get(), WAIT_S) == "a"
    call.cancel()
    assert await asyncio.wait_for(gated.cancelled.get(), WAIT_S) == "a"


async def test_a_deadline_cancels_its_request(server: Grpc) -> None:
    call = server.unary("ModelInfer")(ints("gated", "a", 1), timeout=0.5)
    assert (await refusal(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(server.models.models["gated"].cancelled.get(), WAIT_S) == "a"


async def test_more_calls_than_allowed_are_refused_while_health_still_answers() -> None:
    async with running(GrpcSettings(port=0, max_unary=1)) as server:
        gated = server.models.models["gated"]
        first = server.unary("ModelInfer")(ints("gated", "a", 1))
        await gated.began.get()
        code, message = await refusal(server.send("ModelInfer", ints("echo", "b", 1)))
        assert (code, message) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server has 1 open ModelInfer calls and takes at most 1",
        )
        assert (await server.call("ServerReady")).ready is True
        gated.gate("a").set()
        assert (await first).id == "a"
        assert (await server.send("ModelInfer", ints("echo", "c", 1))).id == "c"


async def test_more_connections_than_allowed_are_closed() -> None:
    async with running(GrpcSettings(port=0, max_connections=2)) as server:
        open_ones = [await connected(server.address) for _ in range(2)]
        assert all([await reader.read(1) for reader, _ in open_ones])
        reader, writer = await connected(server.address)
        assert await reader.read(1) == b""
        writer.close()
        # Whoever leaves makes room, as soon as the server has seen it.
        open_ones.pop()[1].close()
        while not await reader.read(1):
            writer.close()
            reader, writer = await connected(server.address)
        open_ones.append((reader, writer))
        for _, each in open_ones:
            each.close()


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which HTTP/2 has been offered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
    return reader, writer


async def test_more_bytes_than_allowed_are_refused() -> None:
    async with running(GrpcSettings(port=0, max_held_bytes=1000)) as server:
        gated = server.models.models["gated"]
        first = server.unary("ModelInfer")(ints("gated", "a", *range(150)))
        await gated.began.get()
        code, message = await refusal(server.send("ModelInfer", ints("echo", "b", *range(150))))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "bytes of requests and takes at most 1000" in message
        gated.gate("a").set()
        await first
        assert (await server.send("ModelInfer", ints("echo", "c", *range(150)))).id == "c"


async def test_stopping_lets_a_running_call_end(server: Grpc) -> None:
    gated = server.models.models["gated"]
    call = server.unary("ModelInfer")(ints("gated", "a", 1))
    await gated.began.get()
    stopping = asyncio.create_task(server.server.stop(30.0))
    gated.gate("a").set()
    assert (await call).id == "a"
    await stopping


async def test_requests_are_counted_by_method_and_code(server: Grpc) -> None:
    def count(method: str, code: str) -> float:
        return REGISTRY.get_sample_value("tengserve_grpc_requests_total", {"method": method, "code": code}) or 0.0

    keys = [
        ("ServerLive", "OK"),
        ("ModelInfer", "OK"),
        ("ModelInfer", "NOT_FOUND"),
        ("ModelInfer", "CANCELLED"),
        ("ModelStreamInfer", "OK"),
        ("ModelStreamInfer", "NOT_FOUND"),
    ]
    before = [count(*key) for key in keys]
    await server.call("ServerLive")
    await server.send("ModelInfer", ints("echo", "a", 1))
    await refusal(server.send("ModelInfer", ints("nobody", "a", 1)))
    gated = server.models.models["gated"]
    call = server.unary("ModelInfer")(ints("gated", "a", 1))
    await gated.began.get()
    call.cancel()
    await gated.cancelled.get()
    stream = server.stream()
    for name in ("echo", "nobody"):
        await stream.write(ints(name, "a", 1))
        await stream.read()
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert [count(*key) for key in keys] == [value + 1 for value in before]


def test_every_error_has_its_code() -> None:
    told = {code.name: status_of(ModelExecutionError("x", code=code))[0].name for code in errors.ErrorCode}
    assert told == {
        "UNKNOWN": "UNKNOWN",
        "INTERNAL": "INTERNAL",
        "NOT_FOUND": "NOT_FOUND",
        "INVALID_ARG": "INVALID_ARGUMENT",
        "UNAVAILABLE": "UNAVAILABLE",
        "UNSUPPORTED": "UNIMPLEMENTED",
        "ALREADY_EXISTS": "ALREADY_EXISTS",
        "CANCELLED": "CANCELLED",
    }
    assert status_of(errors.OverloadedError("full", retry_after_s=1)) == (grpc.StatusCode.UNAVAILABLE, "full")
    assert status_of(errors.PromptTooLongError("long"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(errors.DeadlineExceededError("late"))[0] is grpc.StatusCode.UNAVAILABLE
    assert status_of(errors.RequestAbortedError("left"))[0] is grpc.StatusCode.CANCELLED
    assert status_of(errors.EngineFailedError("dead"))[0] is grpc.StatusCode.INTERNAL
    assert len(status_of(errors.InvalidRequestError("ü" * 5000))[1].encode()) <= 4000


@pytest.mark.parametrize("name", REFLECTIONS)
async def test_reflection_describes_the_services(server: Grpc, name: str) -> None:
    method = schema().service(name).methods_by_name["ServerReflectionInfo"]
    request, response = message_class(method.input_type), message_class(method.output_type)
    stream = server.channel.stream_stream(
        f"/{name}/ServerReflectionInfo", request.SerializeToString, response.FromString
    )()

    async def ask(**fields: object) -> Message:
        await stream.write(request(**fields))
        return await stream.read()

    services = [service.name for service in (await ask(list_services="")).list_services_response.service]
    assert services == [INFERENCE, HEALTH, *REFLECTIONS]
    files = (await ask(file_containing_symbol=INFERENCE)).file_descriptor_response.file_descriptor_proto
    assert len(files) == 2  # The service's, and that of ModelConfig, which it imports.
    assert b"GRPCInferenceService" in files[0]
    assert (await ask(file_by_filename="model_config.proto")).file_descriptor_response.file_descriptor_proto[0]
    assert (await ask(file_containing_symbol="nothing")).error_response.error_code == 5
    assert (await ask(all_extension_numbers_of_type="x")).error_response.error_code == 12
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_two_servers_do_not_share_a_port(server: Grpc) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ListenError, match=f"cannot listen for gRPC on 127.0.0.1 port {port}"):
        async with running(GrpcSettings(port=port)):
            pass


async def test_the_server_listens_on_its_own_address_only(server: Grpc) -> None:
    port = int(server.address.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", port))


async def test_tls(tls_files: TlsFiles) -> None:
    async with running(GrpcSettings(port=0, tls=tls_files)) as server:
        credentials = grpc.ssl_channel_credentials(tls_files.certificate.read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            plain, server.channel = server.channel, channel
            assert (await server.call("ServerLive")).live is True
            server.channel = plain
        assert (await refusal(server.call("ServerLive")))[0] is grpc.StatusCode.UNAVAILABLE


async def test_wrong_tls_files_are_told(tls_files: TlsFiles, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for certificate, key, reason in (
        (tls_files.certificate, tmp_path / "missing.pem", "No such file"),
        (tls_files.certificate, tmp_path / "empty.pem", ""),
        (tls_files.key, tls_files.key, ""),
    ):
        with pytest.raises(ConfigurationError, match=f"TLS certificate and key of gRPC cannot be used.*{reason}"):
            async with running(GrpcSettings(port=0, tls=TlsFiles(certificate, key))):
                pass


def test_the_page_tells_of_every_rpc_and_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocols" / "v2-grpc.md").read_text()
    methods = [method.name for method in schema().service(INFERENCE).methods]
    assert len(methods) == 20
    assert [name for name in methods if f"`{name}`" not in page] == []
    assert [code.name for code in CODES.values() if code.name not in page] == []
