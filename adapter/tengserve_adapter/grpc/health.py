"""grpc.health.v1 and server reflection: what probes, meshes and grpcurl ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2

from tengserve_adapter.grpc.calls import Subscriptions, of_message, unary, write
from tengserve_adapter.grpc.schema import HEALTH, INFERENCE, REFLECTIONS, Message, message_class, parse, schema
from tengserve_backend.errors import ModelNotFoundError, TengserveError

WATCH_INTERVAL_S: Final = 0.5
_SERVICES: Final = ("", INFERENCE)


class HealthService:
    """Check and Watch; the server as a whole, "", and its inference service are ready together."""

    def __init__(self, check_ready: Callable[[], None], subscriptions: Subscriptions) -> None:
        """Nothing is asked yet.

        Args:
            check_ready: raises a TengserveError when the server can take no request.
            subscriptions: among which each Watch is one.
        """
        self._subscriptions = subscriptions
        self._check_ready = check_ready
        self._response = message_class(schema().service(HEALTH).methods_by_name["Check"].output_type)
        self._request = message_class(schema().service(HEALTH).methods_by_name["Check"].input_type)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """By method."""
        return {
            "Check": unary("Check", of_message(self._request, self._check)),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def _check(self, request: Message) -> Message:
        if request.service not in _SERVICES:
            raise ModelNotFoundError("unknown service", field="service")
        return self._response(status=self._status(request.service))

    async def _watch(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        await self._subscriptions.run(self._tell(data, context), context)

    async def _tell(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        """Tell the status now, and again whenever it is another."""
        service = parse(self._request, data).service
        told: int | None = None
        while True:
            status = self._status(service)
            if status != told:
                await write(context, self._response(status=status))
                told = status
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _status(self, service: str) -> int:
        if service not in _SERVICES:
            return int(self._response.SERVICE_UNKNOWN)
        try:
            self._check_ready()
        except TengserveError:
            return int(self._response.NOT_SERVING)
        return int(self._response.SERVING)


class ReflectionService:
    """One version of the reflection protocol; the messages of both are the same."""

    def __init__(self, name: str, subscriptions: Subscriptions) -> None:
        """Nothing is open yet.

        Args:
            name: of the service, one of REFLECTIONS.
            subscriptions: among which each stream is one.
        """
        self._subscriptions = subscriptions
        method = schema().service(name).methods_by_name["ServerReflectionInfo"]
        self._request = message_class(method.input_type)
        self._response = message_class(method.output_type)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """By method."""
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._serve)}

    async def _serve(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        await self._subscriptions.run(self._answer_all(context), context)

    async def _answer_all(self, context: grpc.aio.ServicerContext) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            await write(context, self._answer(parse(self._request, data)))

    def _answer(self, request: Message) -> Message:
        response = self._response(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in (INFERENCE, HEALTH, *REFLECTIONS):
                response.list_services_response.service.add(name=name)
            return response
        find = {
            "file_by_filename": schema().pool.FindFileByName,
            "file_containing_symbol": schema().pool.FindFileContainingSymbol,
        }.get(kind)
        if find is None:
            response.error_response.error_code = grpc.StatusCode.UNIMPLEMENTED.value[0]
            response.error_response.error_message = "only files, symbols and services can be asked for"
            return response
        try:
            file = find(getattr(request, kind))
        except KeyError:
            response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = "not found"
            return response
        response.file_descriptor_response.file_descriptor_proto.extend(map(_serialized, _with_imports(file)))
        return response


def _with_imports(file: Any) -> Iterable[Any]:
    """The file and, after it, all that it imports, each once."""
    found = {file.name: file}
    for other in (dependency for each in list(found.values()) for dependency in each.dependencies):
        found.setdefault(other.name, other)
    return found.values()


def _serialized(file: Any) -> bytes:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    data: bytes = proto.SerializeToString()
    return data
