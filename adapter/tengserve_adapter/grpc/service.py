"""The unary RPCs of inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
from google.protobuf import json_format

from tengserve_adapter.control import ModelControl
from tengserve_adapter.grpc.calls import INLINE_BYTES, Gate, of_message, unary
from tengserve_adapter.grpc.codec import Asked, serialize_response
from tengserve_adapter.grpc.incoming import Incoming, Reader
from tengserve_adapter.grpc.schema import INFERENCE, Message, message_class, schema
from tengserve_adapter.grpc.settings import GrpcSettings
from tengserve_adapter.http.models import Models
from tengserve_adapter.protocols.health import EXTENSIONS, model_metadata
from tengserve_backend.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ServerError,
    ShuttingDownError,
    TengserveError,
    UnsupportedError,
    shown,
)
from tengserve_backend.inference import InferRequest, InferResponse, TensorModel
from tengserve_backend.inference.request import larger_than
from tengserve_backend.inference.unary import infer_once

_T = TypeVar("_T")

_CONFIG: Final = "config"
_FILE: Final = "file:"


@dataclass(frozen=True, slots=True)
class Served:
    """What the RPCs are about.

    Attributes:
        models, control: the models, and the repository that they come from.
        check_live, check_ready: raise a TengserveError when the server is not.
        draining: whether nothing new is to be admitted.
    """

    models: Models
    control: ModelControl
    check_live: Callable[[], None]
    check_ready: Callable[[], None]
    draining: Callable[[], bool]


class InferenceService:
    """Everything but ModelStreamInfer.

    Attributes:
        held: the bytes of requests that are being answered, those of streams too.
    """

    def __init__(self, served: Served, settings: GrpcSettings) -> None:
        """No call has come yet.

        Args:
            served: what the RPCs are about.
            settings: the operator's.
        """
        self._served = served
        self._settings = settings
        self._messages = schema().messages
        self._reader = Reader(self._admitting)
        self._infers = Gate(settings.max_unary, "open ModelInfer calls")
        self.held = Gate(settings.max_held_bytes, "bytes of requests")

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """By method, each RPC but the stream."""
        calls = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_model_load,
            "RepositoryModelUnload": self._repository_model_unload,
            "SystemSharedMemoryStatus": self._shared_memory_status,
            "SystemSharedMemoryRegister": self._shared_memory_register,
            "SystemSharedMemoryUnregister": self._shared_memory_unregister,
            "CudaSharedMemoryStatus": self._shared_memory_status,
            "CudaSharedMemoryRegister": self._shared_memory_register,
            "CudaSharedMemoryUnregister": self._shared_memory_unregister,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }
        methods = schema().service(INFERENCE).methods_by_name
        handlers = {
            name: unary(name, of_message(message_class(methods[name].input_type), call)) for name, call in calls.items()
        }
        return {"ModelInfer": unary("ModelInfer", self._model_infer), **handlers}

    async def read(self, data: bytes, context: grpc.aio.ServicerContext) -> Incoming:
        """A request and the model that is to answer it."""
        read = self._reader.read
        incoming = read(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(read, data)
        forwarded = self._settings.forwarded_headers
        if forwarded is None or isinstance(incoming.work, Exception):
            return incoming
        model, asked = incoming.work
        try:
            request = forwarded.added_to(asked.request, model, _texts(context.invocation_metadata() or ()))
        except InvalidRequestError as error:
            return replace(incoming, work=error)
        return replace(incoming, work=(model, replace(asked, request=request)))

    def _admitting(self, name: str, version: str) -> TensorModel:
        """The model, if the server still takes requests."""
        if self._served.draining():
            raise ShuttingDownError("The service is stopping and takes no new requests.")
        return self._model(name, version)

    def _model(self, name: str, version: str) -> TensorModel:
        _check_version(version)
        try:
            return self._served.models.tensor_model(name, version or None)
        except ModelNotFoundError as error:
            which = f" version {shown(version)}" if version else ""
            text = f"Request for unknown model: '{shown(name)}'{which} is not found"
            raise ModelNotFoundError(text, field="model") from error

    async def _model_infer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with self._infers.enter(), self.held.enter(len(data)):
            work = (await self.read(data, context)).work
            if isinstance(work, Exception):
                raise work
            model, asked = work
            if model.decoupled and self._settings.strict_decoupled:
                raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
            response = await infer_once(model, asked.request)
            return await encoded(serialize_response, model, asked, response)

    async def _server_live(self, request: Message) -> Message:
        return self._messages["ServerLiveResponse"](live=_holds(self._served.check_live))

    async def _server_ready(self, request: Message) -> Message:
        return self._messages["ServerReadyResponse"](ready=_holds(self._served.check_ready))

    async def _model_ready(self, request: Message) -> Message:
        ready = False
        if not self._served.draining():
            try:
                ready = await self._model(request.name, request.version).is_ready()
            except (ModelNotFoundError, ServerError):
                ready = False
        return self._messages["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self, request: Message) -> Message:
        return self._messages["ServerMetadataResponse"](
            name=self._settings.server_name, version=self._settings.server_version, extensions=EXTENSIONS
        )

    async def _model_metadata(self, request: Message) -> Message:
        model = self._model(request.name, request.version)
        statuses = self._served.models.statuses()
        versions = [each.version for each in statuses if each.name == model.name and each.state.value == "READY"]
        return json_format.ParseDict(model_metadata(model, versions), self._messages["ModelMetadataResponse"]())

    async def _model_config(self, request: Message) -> Message:
        _check_version(request.version)
        config = self._served.control.config(request.name, request.version)
        response = self._messages["ModelConfigResponse"]()
        json_format.ParseDict(dict(config), response.config)
        return response

    async def _model_statistics(self, request: Message) -> Message:
        _check_version(request.version)
        rows = self._served.control.statistics(request.name, request.version)
        response = self._messages["ModelStatisticsResponse"]()
        for row in rows:
            json_format.ParseDict(dict(row), response.model_stats.add())
        return response

    async def _repository_index(self, request: Message) -> Message:
        _check_repository(request)
        rows = await self._served.control.index(ready_only=request.ready)
        response = self._messages["RepositoryIndexResponse"]()
        for row in rows:
            response.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)
        return response

    async def _repository_model_load(self, request: Message) -> Message:
        _check_repository(request)
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in request.parameters.items():
            if key == _CONFIG and value.WhichOneof("parameter_choice") == "string_param":
                config = value.string_param
            elif key.startswith(_FILE) and value.WhichOneof("parameter_choice") == "bytes_param":
                files[key.removeprefix(_FILE)] = value.bytes_param
            else:
                raise InvalidRequestError(
                    f"parameter '{shown(key)}' must be config with a string_param, or file:<path> with a bytes_param",
                    field=shown(key),
                )
        await self._served.control.load(request.model_name, config, files)
        return self._messages["RepositoryModelLoadResponse"]()

    async def _repository_model_unload(self, request: Message) -> Message:
        _check_repository(request)
        dependents = False
        for key, value in request.parameters.items():
            if key != "unload_dependents" or value.WhichOneof("parameter_choice") != "bool_param":
                raise InvalidRequestError(
                    f"parameter '{shown(key)}' must be unload_dependents with a bool_param", field=shown(key)
                )
            dependents = value.bool_param
        await self._served.control.unload(request.model_name, unload_dependents=dependents)
        return self._messages["RepositoryModelUnloadResponse"]()

    async def _shared_memory_status(self, request: Message) -> Message:
        if request.name:
            raise ModelNotFoundError(f"Unable to find shared memory region: '{shown(request.name)}'", field="name")
        return self._answer_to(request)

    async def _shared_memory_register(self, request: Message) -> Message:
        raise UnsupportedError("this server serves no shared memory: send tensors with the request")

    async def _shared_memory_unregister(self, request: Message) -> Message:
        return self._answer_to(request)

    def _answer_to(self, request: Message) -> Message:
        """An empty response to a request of the same name."""
        return self._messages[request.DESCRIPTOR.name.removesuffix("Request") + "Response"]()

    async def _trace_setting(self, request: Message) -> Message:
        changes = {name: list(setting.value) or None for name, setting in request.settings.items()}
        response = self._messages["TraceSettingResponse"]()
        for name, values in self._served.control.trace_settings(request.model_name, changes).items():
            response.settings[name].value.extend(values)
        return response

    async def _log_settings(self, request: Message) -> Message:
        changes: dict[str, bool | int | str] = {}
        for name, setting in request.settings.items():
            kind = setting.WhichOneof("parameter_choice")
            if kind is None:
                raise InvalidRequestError(f"log setting '{shown(name)}' must have a value", field=shown(name))
            changes[name] = getattr(setting, kind)
        response = self._messages["LogSettingsResponse"]()
        for name, value in self._served.control.log_settings(changes).items():
            entry: Any = response.settings[name]
            if isinstance(value, bool):
                entry.bool_param = value
            elif isinstance(value, int):
                entry.uint32_param = value
            else:
                entry.string_param = value
        return response


async def encoded(
    encode: Callable[[TensorModel, InferRequest, InferResponse], _T],
    model: TensorModel,
    asked: Asked,
    response: InferResponse,
) -> _T:
    """What `encode` makes of a response, in a worker thread when it is big."""
    if not larger_than(response.outputs, INLINE_BYTES):
        return encode(model, asked.request, response)
    return await asyncio.to_thread(encode, model, asked.request, response)


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[tuple[str, str]]:
    """The metadata that is text; what is binary has a name that ends in -bin."""
    return ((name, value) for name, value in metadata if isinstance(value, str))


def says_only_final(response: InferResponse) -> bool:
    """Whether a decoupled model's response tells nothing but that it is the last."""
    return response.final and not response.outputs and not response.parameters


def _holds(check: Callable[[], None]) -> bool:
    try:
        check()
    except TengserveError:
        return False
    return True


def _check_version(version: str) -> None:
    """As in a path of HTTP, where nothing but digits is a version."""
    if version and not (version.isascii() and version.isdigit()):
        raise InvalidRequestError(
            f"failed to get model version from specified version string '{shown(version)}', version should be an"
            " integral value > 0",
            field="model_version",
        )


def _check_repository(request: Message) -> None:
    if request.repository_name:
        raise UnsupportedError("'repository_name' specification is not supported")
