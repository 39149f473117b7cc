"""Headers that become parameters of a request, over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from support.grpc_client import infer_request, running
from support.identity import IdentityModel
from tengserve_adapter.grpc.settings import GrpcSettings
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.tensors.forwarded_headers import ForwardedHeaders

TENSOR = {"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}
TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}


async def ask(
    model: IdentityModel, pattern: str | None, headers: dict[str, str], *, url: str = "identity/infer", **body: Any
) -> httpx.Response:
    forwarded = None if pattern is None else ForwardedHeaders(pattern)
    app = app_with(FakeEngine(), tensor_models=[model], settings=HttpSettings(forwarded_headers=forwarded))
    async with client_of(app) as client:
        return await client.post(f"/v2/models/{url}", json={"inputs": [TENSOR], **body}, headers=headers)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, {}),
        ("^X-Tenant", {"x-tenant": "blue", "x-tenant-zone": 'zwölf "a" \\ '}),
        ("zone", {"x-tenant-zone": 'zwölf "a" \\ '}),
        ("(?-i)X-", {}),
        ("(?-i)x-.*nt$", {"x-tenant": "blue"}),
    ],
)
async def test_headers_that_match_are_parameters(pattern: str | None, expected: dict[str, str]) -> None:
    model = IdentityModel()
    async with client_of(
        app_with(
            tensor_models=[model],
            settings=HttpSettings(forwarded_headers=None if pattern is None else ForwardedHeaders(pattern)),
        )
    ) as client:
        response = await client.post(
            "/v2/models/identity/infer",
            json={"inputs": [TENSOR], "parameters": {"mine": 1}},
            headers=[
                (b"X-Tenant", b"blue"),
                (b"X-Tenant-Zone", 'zwölf "a" \\ '.encode()),
                (b"X-" + b"n" * 127 + b"-zone-x-tenant", b"long"),
            ],
        )
    assert response.status_code == 200
    assert model.requests[0].parameters == {"mine": 1, **expected}


async def test_a_header_wins_over_the_request_s_own_parameter() -> None:
    model = IdentityModel()
    await ask(model, "tenant", {"tenant": "blue"}, parameters={"tenant": "red"})
    assert model.requests[0].parameters == {"tenant": "blue"}


@pytest.mark.parametrize("name", ["priority", "sequence_id", "headers", "triton_final_response"])
async def test_a_header_with_a_name_of_the_protocol_is_refused(name: str) -> None:
    says = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    model = IdentityModel()
    response = await ask(model, ".*", {name: "1"})
    assert (response.status_code, response.json()) == (400, {"error": says})
    assert (await ask(model, "tenant", {name: "1"})).status_code == 200  # It is not forwarded.
    async with running(GrpcSettings(port=0, forwarded_headers=ForwardedHeaders("."))) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.unary("ModelInfer")(infer_request("echo"), metadata=((name, "1"),))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, says)


async def test_more_headers_than_parameters_are_refused() -> None:
    model = IdentityModel()
    parameters = {f"p{index}": index for index in range(1024)}
    response = await ask(model, "tenant", {"tenant": "blue"}, parameters=parameters)
    assert response.status_code == 400
    assert response.json() == {"error": "a request has at most 1024 parameters, got 1025 with its headers"}


async def test_an_llm_is_asked_as_without_them() -> None:
    response = await ask(IdentityModel(), ".*", {}, url="smollm2/infer", inputs=[TEXT])
    assert response.status_code == 200


async def test_metadata_of_calls_and_streams() -> None:
    metadata = (("my-header", "1"), ("my-key-bin", b"\xff"), ("other", "2"))
    settings = GrpcSettings(port=0, forwarded_headers=ForwardedHeaders("MY-"))
    async with running(settings) as server:
        await server.unary("ModelInfer")(infer_request("echo", "a"), metadata=metadata)
        stream = server.stream(metadata)
        for request_id in ("b", "c"):
            await stream.write(infer_request("echo", request_id))
        await stream.done_writing()
        assert [reply.infer_response.id async for reply in stream] == ["b", "c"]
        asked = server.models.models["echo"].requests
    assert [request.parameters for request in asked] == [{"my-header": "1"}] * 3
