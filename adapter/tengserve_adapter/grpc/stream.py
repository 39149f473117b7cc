"""ModelStreamInfer: many requests and many models on one stream.

Requests are read as they come, up to a bound of unanswered ones, and each is answered by a task of its own. Responses
of decoupled models are written as they are made, so those of different requests mix. A model with one response a
request answers in the order of its requests, as does every request that is refused before a model saw it.

The stream ends when the client has closed its side and everything is answered. A client that cancels, or leaves, or
whose deadline passes, cancels every request.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from tengserve_adapter.grpc.calls import ClientGoneError, Gate, counted, fail, write
from tengserve_adapter.grpc.codec import FINAL, Asked, encode_response
from tengserve_adapter.grpc.incoming import Incoming
from tengserve_adapter.grpc.schema import Message, schema
from tengserve_adapter.grpc.service import InferenceService, encoded, says_only_final
from tengserve_adapter.grpc.settings import GrpcSettings
from tengserve_adapter.grpc.status import status_of
from tengserve_backend.errors import ServerError, ShuttingDownError
from tengserve_backend.inference import InferResponse, TensorModel
from tengserve_backend.inference.unary import closing

METHOD: Final = "ModelStreamInfer"
STRICT_ERRORS: Final = "triton_grpc_error"
"""Metadata of a client that wants a stream's first error as its status."""
WRITE_TIMEOUT_S: Final = 120.0
"""How long a client may take no response while one waits for it."""


class StreamService:
    """Every stream that is open."""

    def __init__(self, inference: InferenceService, settings: GrpcSettings) -> None:
        """No stream is open yet.

        Args:
            inference: reads requests.
            settings: the operator's.
        """
        self._inference = inference
        self._max_requests = settings.max_stream_requests
        self._gate = Gate(settings.max_streams, "open streams")
        self._open: set[_Stream] = set()

    def handler(self) -> grpc.RpcMethodHandler:
        """Of ModelStreamInfer."""
        return grpc.stream_stream_rpc_method_handler(self._serve)

    def close(self) -> None:
        """Read nothing more: each stream ends when what it has is answered."""
        for stream in self._open:
            stream.close()

    async def _serve(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        try:
            with self._gate.enter():
                stream = _Stream(self._inference, context, self._max_requests)
                self._open.add(stream)
                try:
                    await stream.run()
                finally:
                    self._open.discard(stream)
        except ClientGoneError:
            return
        except _StreamFailedError as failure:
            await context.abort(failure.code, failure.message)
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a status, the unexpected is logged
            await fail(context, error)


class _Stream:
    """One stream."""

    def __init__(self, inference: InferenceService, context: grpc.aio.ServicerContext, max_requests: int) -> None:
        self._inference = inference
        self._context = context
        self._slots = asyncio.Semaphore(max_requests)
        self._writing = asyncio.Lock()
        self._last_turn: asyncio.Event | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closed = False
        metadata = dict(context.invocation_metadata() or ())
        self._strict = metadata.get(STRICT_ERRORS) == "true"

    async def run(self) -> None:
        """Answer until the client has closed its side.

        Raises:
            Exception: as the status of the stream.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._reader = tasks.create_task(self._read(tasks))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._closed:
            raise ShuttingDownError("The service is stopping.")

    def close(self) -> None:
        """Read nothing more."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._slots.acquire()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            incoming = await self._inference.read(data, self._context)
            tasks.create_task(self._answer(incoming, *self._turn(incoming)))

    def _turn(self, incoming: Incoming) -> tuple[asyncio.Event | None, asyncio.Event | None]:
        """What to wait for before the first response, and what to set after the last."""
        if not isinstance(incoming.work, Exception) and incoming.work[0].decoupled:
            return None, None
        before, self._last_turn = self._last_turn, asyncio.Event()
        return before, self._last_turn

    async def _answer(self, incoming: Incoming, before: asyncio.Event | None, after: asyncio.Event | None) -> None:
        try:
            await self._respond(incoming, before)
        finally:
            if after is not None:
                after.set()
            self._slots.release()

    async def _respond(self, incoming: Incoming, before: asyncio.Event | None) -> None:
        with counted(METHOD) as outcome:
            try:
                if isinstance(incoming.work, Exception):
                    raise incoming.work
                with self._inference.held.enter(incoming.size):
                    await self._infer(*incoming.work, before)
                outcome.code = grpc.StatusCode.OK
            except (ClientGoneError, _ClientStuckError):
                raise
            except Exception as error:  # noqa: BLE001 - told to the client as this request's answer; see status_of
                if before is not None:
                    await before.wait()
                outcome.code, message = status_of(error)
                if self._strict:
                    raise _StreamFailedError(outcome.code, message) from None
                await self._write(_refusal(incoming, message))

    async def _infer(self, model: TensorModel, asked: Asked, before: asyncio.Event | None) -> None:
        ended = False
        async with closing(model.infer(asked.request)) as responses:
            async for response in responses:
                ended = response.final
                if model.decoupled and says_only_final(response) and not asked.empty_final:
                    continue
                message = await encoded(encode_response, model, asked, response)
                if before is not None:
                    await before.wait()
                await self._write_response(message, final=response.final or not model.decoupled)
        if not ended and model.decoupled and asked.empty_final:
            request = asked.request
            empty = InferResponse(model.name, model.version, request.request_id, outputs=())
            await self._write_response(await encoded(encode_response, model, asked, empty), final=True)

    async def _write_response(self, message: Message, *, final: bool) -> None:
        message.parameters[FINAL].bool_param = final
        await self._write(_stream_response(infer_response=message))

    async def _write(self, message: Message) -> None:
        """Write one message; one at a time, and a client that takes none holds up its own requests only."""
        async with self._writing:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await write(self._context, message)
            except TimeoutError:
                raise _ClientStuckError(f"the client took no response for {WRITE_TIMEOUT_S:g} s") from None


class _StreamFailedError(Exception):
    """A request has failed whose client wants the stream to end with its status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _ClientStuckError(ServerError):
    """The client does not read."""


def _stream_response(**fields: object) -> Message:
    return schema().messages["ModelStreamInferResponse"](**fields)


def _refusal(incoming: Incoming, text: str) -> Message:
    """An error as an answer: clients read the message; those that read on find which request it is about."""
    message = _stream_response(error_message=text or "unknown error")
    response = message.infer_response
    response.model_name = incoming.model_name
    response.model_version = incoming.version
    response.id = incoming.request_id
    response.parameters[FINAL].bool_param = True
    return message
