"""A gRPC server over plain models, and calls to it with our own messages: tritonclient cannot share our process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from support.tensor_models import PlainControl, PlainModels
from tengserve_adapter.grpc.schema import HEALTH, INFERENCE, message_class, schema
from tengserve_adapter.grpc.server import GrpcServer
from tengserve_adapter.grpc.service import Served
from tengserve_adapter.grpc.settings import GrpcSettings
from tengserve_backend.errors import ShuttingDownError

Message = Any


class Calls:
    """Calls over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, method: str, service: str = INFERENCE, /, **fields: object) -> Message:
        """The response of a unary RPC to a request with these fields."""
        descriptor = schema().service(service).methods_by_name[method]
        request = message_class(descriptor.input_type)(**fields)
        return await self.send(method, request, service)

    async def send(self, method: str, request: Message, service: str = INFERENCE) -> Message:
        """The response of a unary RPC to this request, a message or any bytes."""
        return await self.unary(method, service)(request)

    def unary(self, method: str, service: str = INFERENCE) -> Any:
        return self.channel.unary_unary(f"/{service}/{method}", _serialized, self._parser(service, method))

    def stream(self, metadata: tuple[tuple[str, str], ...] = (), timeout: float | None = None) -> Any:
        call = self.channel.stream_stream(
            f"/{INFERENCE}/ModelStreamInfer", _serialized, self._parser(INFERENCE, "ModelStreamInfer")
        )
        return call(metadata=metadata, timeout=timeout)

    def watch(self, service: str) -> Any:
        request = message_class(schema().service(HEALTH).methods_by_name["Watch"].input_type)(service=service)
        return self.channel.unary_stream(f"/{HEALTH}/Watch", _serialized, self._parser(HEALTH, "Watch"))(request)

    def _parser(self, service: str, method: str) -> Callable[[bytes], Message]:
        kind = message_class(schema().service(service).methods_by_name[method].output_type)
        return kind.FromString


@dataclass
class Grpc(Calls):
    """A running server, what is behind it, and a channel to it."""

    settings: GrpcSettings = field(default_factory=lambda: GrpcSettings(port=0, server_version="1.2.3"))
    models: PlainModels = field(default_factory=PlainModels)
    control: PlainControl = field(default_factory=PlainControl)
    draining: bool = False
    server: GrpcServer = field(init=False)
    channel: grpc.aio.Channel = field(init=False)
    address: str = ""

    def __post_init__(self) -> None:
        served = Served(self.models, self.control, lambda: None, self._check_ready, lambda: self.draining)
        self.server = GrpcServer(served, self.settings)

    def _check_ready(self) -> None:
        if self.draining:
            raise ShuttingDownError("The service is stopping.")


def _serialized(request: Message) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


@asynccontextmanager
async def calls_to(address: str) -> AsyncIterator[Calls]:
    """Calls to a server elsewhere."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield Calls(channel)


@asynccontextmanager
async def running(settings: GrpcSettings | None = None) -> AsyncIterator[Grpc]:
    """A server that is up, and is stopped."""
    server = Grpc() if settings is None else Grpc(settings)
    server.address = await server.server.start()
    try:
        async with grpc.aio.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel:
            server.channel = channel
            yield server
    finally:
        await server.server.stop(1.0)


def infer_request(model: str, request_id: str = "", **fields: object) -> Message:
    return schema().messages["ModelInferRequest"](model_name=model, id=request_id, **fields)


def raw(request: Message, name: str, datatype: str, shape: list[int], data: bytes) -> Message:
    """The request with one more raw input."""
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)
    return request


def ints(model: str, request_id: str, *values: int) -> Message:
    """A request with the input IN."""
    return raw(infer_request(model, request_id), "IN", "INT32", [len(values)], _int32(*values))


def _int32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)
