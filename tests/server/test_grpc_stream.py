"""ModelStreamInfer, seen by a client: final responses, order, errors, and every way in which a stream can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from support.grpc_client import Grpc, Message, infer_request, ints, running
from tengserve_adapter.grpc import stream as stream_module
from tengserve_adapter.grpc.settings import GrpcSettings

WAIT_S = 20.0


@pytest.fixture
async def server() -> AsyncIterator[Grpc]:
    async with running() as server:
        yield server


def with_parameter(request: Message, name: str, **value: object) -> Message:
    for field, content in value.items():
        setattr(request.parameters[name], field, content)
    return request


def values(response: Message) -> list[int]:
    return [int(value) for raw in response.infer_response.raw_output_contents for value in np.frombuffer(raw, "<i4")]


def final(response: Message) -> bool:
    parameter = response.infer_response.parameters["triton_final_response"]
    assert parameter.WhichOneof("parameter_choice") == "bool_param"
    return bool(parameter.bool_param)


async def read_to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def answers(server: Grpc, *requests: Message) -> list[Message]:
    """All responses to these requests on a stream whose client then closes its side."""
    stream = server.stream()
    for request in requests:
        await stream.write(request)
    await stream.done_writing()
    found = [response async for response in stream]
    assert await stream.code() is grpc.StatusCode.OK
    return found


async def test_a_model_that_ends_separately_leaves_no_final_response(server: Grpc) -> None:
    found = await answers(server, ints("repeat", "a", 4, 5))
    assert [(values(response), final(response)) for response in found] == [([4], False), ([5], False)]
    assert {response.infer_response.id for response in found} == {"a"}
    assert found[0].infer_response.model_name == "repeat"
    assert found[0].infer_response.model_version == "1"


async def test_an_empty_final_response_comes_for_those_who_ask(server: Grpc) -> None:
    request = with_parameter(ints("repeat", "a", 4), "triton_enable_empty_final_response", bool_param=True)
    found = await answers(server, request)
    assert [(values(response), final(response)) for response in found] == [([4], False), ([], True)]
    last = found[-1].infer_response
    assert (last.id, last.model_name, last.model_version, len(last.outputs)) == ("a", "repeat", "1", 0)
    assert not server.models.models["repeat"].requests[0].parameters


@pytest.mark.parametrize("asked", [False, True])
async def test_a_final_flag_on_the_last_response_is_passed_on(server: Grpc, asked: bool) -> None:
    request = with_parameter(ints("repeat", "a", 4, 5), "attached", bool_param=True)
    with_parameter(request, "triton_enable_empty_final_response", bool_param=asked)
    assert [final(response) for response in await answers(server, request)] == [False, True]


async def test_a_request_without_responses_ends_with_the_empty_final_one(server: Grpc) -> None:
    request = with_parameter(ints("repeat", "a"), "triton_enable_empty_final_response", bool_param=True)
    assert [final(response) for response in await answers(server, request)] == [True]
    assert await answers(server, ints("repeat", "a")) == []


async def test_the_empty_final_response_must_be_asked_for_with_a_boolean(server: Grpc) -> None:
    request = with_parameter(ints("repeat", "a", 1), "triton_enable_empty_final_response", int64_param=1)
    found = await answers(server, request)
    assert [response.error_message for response in found] == [
        "parameter 'triton_enable_empty_final_response' must be a bool_param"
    ]


async def test_a_model_with_one_response_gives_one_final_response(server: Grpc) -> None:
    request = with_parameter(ints("echo", "a", 7), "triton_enable_empty_final_response", bool_param=True)
    found = await answers(server, request)
    assert [(values(response), final(response)) for response in found] == [([7], True)]


async def test_models_with_one_response_answer_in_the_order_of_their_requests(server: Grpc) -> None:
    stream = server.stream()
    for request_id, number in (("a", 1), ("b", 2)):
        await stream.write(ints("gated", request_id, number))
    await stream.write(ints("nobody", "c", 3))
    await stream.write(ints("repeat", "d", 4))
    gated = server.models.models["gated"]
    gated.gate("b").set()
    # The stream is not held up for others.
    assert values(await stream.read()) == [4]
    gated.gate("a").set()
    assert values(await stream.read()) == [1]
    assert values(await stream.read()) == [2]
    refused = await stream.read()
    assert refused.infer_response.id == "c"
    assert "nobody" in refused.error_message
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_many_requests_of_several_models_share_a_stream(server: Grpc) -> None:
    requests = [ints("repeat" if number % 2 else "echo", str(number), number, -number) for number in range(40)]
    found = await answers(server, *requests)
    for number in range(40):
        mine = [response for response in found if response.infer_response.id == str(number)]
        assert [value for response in mine for value in values(response)] == [number, -number]
    ordered = [int(response.infer_response.id) for response in found if response.infer_response.model_name == "echo"]
    assert ordered == list(range(0, 40, 2))


@pytest.mark.parametrize(
    ("request_message", "complaint"),
    [
        (ints("nobody", "x", 1), "Request for unknown model: 'nobody' is not found"),
        (ints("loading", "x", 1), "Model loading is loading."),
        (infer_request("echo", "x", inputs=[{"name": "A", "datatype": "INT9", "shape": [1]}]), "got 'INT9'"),
        (b"\xff\xff\xff", "the request is no message inference.ModelInferRequest"),
        (with_parameter(ints("failing", "x", 1), "code", string_param="UNAVAILABLE"), "the model said no"),
        (ints("failing", "x", 1), "Internal server error."),
    ],
)
async def test_an_error_is_an_answer_and_the_stream_goes_on(
    server: Grpc, request_message: Message, complaint: str
) -> None:
    stream = server.stream()
    await stream.write(request_message)
    response = await stream.read()
    while not response.error_message:
        assert not final(response)
        response = await stream.read()
    assert complaint in response.error_message
    assert final(response)
    if not isinstance(request_message, bytes):
        assert response.infer_response.id == "x"
        assert response.infer_response.model_name == request_message.model_name
    await stream.write(ints("echo", "y", 3))
    assert values(await stream.read()) == [3]
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_a_client_may_ask_for_errors_as_the_status(server: Grpc) -> None:
    stream = server.stream(metadata=(("triton_grpc_error", "true"),))
    await stream.write(ints("endless", "a", 1))
    await stream.read()
    await stream.write(with_parameter(ints("failing", "x", 1), "code", string_param="UNSUPPORTED"))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read_to_the_end(stream)
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert failed.value.details() == "the model said no"
    assert await asyncio.wait_for(server.models.models["endless"].cancelled.get(), WAIT_S) == "a"


async def test_half_close_lets_everything_be_answered(server: Grpc) -> None:
    stream = server.stream()
    await stream.write(ints("gated", "a", 1))
    await stream.write(ints("gated", "b", 2))
    await stream.done_writing()
    for request_id in ("b", "a"):
        server.models.models["gated"].gate(request_id).set()
    assert [values(response) async for response in stream] == [[1], [2]]
    assert await stream.code() is grpc.StatusCode.OK


async def test_a_cancelled_stream_cancels_every_request(server: Grpc) -> None:
    stream = server.stream()
    for request_id in ("a", "b"):
        await stream.write(ints("endless", request_id, 1))
    await stream.write(ints("gated", "c", 1))
    seen = {(await stream.read()).infer_response.id for _ in range(20)}
    assert seen == {"a", "b"}
    stream.cancel()
    endless, gated = server.models.models["endless"], server.models.models["gated"]
    assert {await asyncio.wait_for(endless.cancelled.get(), WAIT_S) for _ in range(2)} == {"a", "b"}
    assert await asyncio.wait_for(gated.cancelled.get(), WAIT_S) == "c"


async def test_a_deadline_cancels_every_request(server: Grpc) -> None:
    stream = server.stream(timeout=0.5)
    await stream.write(ints("gated", "a", 1))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stream.read()
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(server.models.models["gated"].cancelled.get(), WAIT_S) == "a"


async def test_a_lost_connection_cancels_every_request(server: Grpc) -> None:
    stream = server.stream()
    await stream.write(ints("endless", "a", 1))
    await stream.read()
    await server.channel.close()
    assert await asyncio.wait_for(server.models.models["endless"].cancelled.get(), WAIT_S) == "a"


async def test_a_stream_is_not_read_while_too_much_of_it_is_unanswered() -> None:
    async with running(GrpcSettings(port=0, max_stream_requests=2)) as server:
        stream = server.stream()
        gated = server.models.models["gated"]
        for number in range(4):
            await stream.write(ints("gated", str(number), number))
        gated.gate("0").set()
        assert values(await stream.read()) == [0]
        # The first answer made room for the third request, and for no other.
        gated.gate("1").set()
        assert values(await stream.read()) == [1]
        assert len(gated.requests) <= 4
        for number in (2, 3):
            gated.gate(str(number)).set()
            assert values(await stream.read()) == [number]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_client_that_takes_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch, server: Grpc) -> None:
    monkeypatch.setattr(stream_module, "WRITE_TIMEOUT_S", 0.2)
    stream = server.stream()
    await stream.write(ints("endless", "a", *range(100_000)))
    assert await asyncio.wait_for(server.models.models["endless"].cancelled.get(), WAIT_S) == "a"
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read_to_the_end(stream)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "the client took no response for 0.2 s"


async def test_more_bytes_than_allowed_are_refused_on_a_stream_that_goes_on() -> None:
    async with running(GrpcSettings(port=0, max_held_bytes=1000)) as server:
        found = await answers(server, ints("repeat", "a", *range(1000)), ints("repeat", "b", 1))
    assert found[0].infer_response.id == "a"
    assert found[0].error_message == "the server has 0 bytes of requests and takes at most 1000"
    assert [values(response) for response in found[1:]] == [[1]]


async def test_more_streams_than_allowed_are_refused() -> None:
    async with running(GrpcSettings(port=0, max_streams=1)) as server:
        first = server.stream()
        await first.write(ints("echo", "a", 1))
        assert values(await first.read()) == [1]
        second = server.stream()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.value.details() == "the server has 1 open streams and takes at most 1"
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF


async def test_a_stopping_server_refuses_new_requests_and_ends_idle_streams(server: Grpc) -> None:
    stream = server.stream()
    await stream.write(ints("gated", "a", 1))
    await stream.write(ints("gated", "b", 2))
    await server.models.models["gated"].began.get()
    await server.models.models["gated"].began.get()
    server.draining = True
    await stream.write(ints("echo", "c", 3))
    for request_id in ("a", "b"):
        server.models.models["gated"].gate(request_id).set()
    assert [values(await stream.read()) for _ in range(2)] == [[1], [2]]
    refused = await stream.read()
    assert (refused.infer_response.id, refused.error_message) == (
        "c",
        "The service is stopping and takes no new requests.",
    )
    await server.server.stop(5.0)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.read()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ended.value.details() == "The service is stopping."
