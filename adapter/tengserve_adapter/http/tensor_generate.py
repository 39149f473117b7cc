"""Triton's generate and generate_stream for models of tensors; an LLM goes to its own endpoint."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tengserve_adapter.http.body import INLINE_BYTES
from tengserve_adapter.http.disconnect import ClientDisconnected, while_connected
from tengserve_adapter.http.edge import answered
from tengserve_adapter.http.endpoints import Context
from tengserve_adapter.http.sse import EventStream, send_json
from tengserve_adapter.http.tensor_body import ContentRoom, content_of, in_thread_if, parse_json
from tengserve_adapter.http.tensors import find_model
from tengserve_adapter.http.triton_errors import status_for, triton_body, triton_response
from tengserve_adapter.protocols import triton_generate
from tengserve_backend.errors import GenerationFailedError, ModelExecutionError, TengserveError
from tengserve_backend.inference import InferRequest, InferResponse, TensorModel
from tengserve_backend.inference.llm import LlmTensorModel
from tengserve_backend.inference.request import larger_than
from tengserve_backend.inference.unary import closing

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
"""Compared by Triton's tests letter by letter."""

SEND_TIMEOUT_S: Final = 60.0
"""How long a client may take to read one event before its stream is given up."""


class TensorGenerateEndpoint:
    """An ASGI endpoint for one of the two verbs."""

    def __init__(self, context: Context, llm: ASGIApp, *, stream: bool) -> None:
        """An endpoint.

        Args:
            context: what every route works with.
            llm: serves the same URL for an LLM, and says what is wrong with a model that cannot be found.
            stream: the verb is generate_stream.
        """
        self._context = context
        self._llm = llm
        self._stream = stream
        self._room = ContentRoom(context.settings.max_held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing is raised but cancellation."""
        request = Request(scope)
        version: str | None = request.path_params.get("version")
        try:
            model = find_model(self._context, request.path_params["model"], version)
        except TengserveError:
            model = None
        if model is None or isinstance(model, LlmTensorModel):
            await self._llm(scope, receive, send)
            return
        served = self._serve(model, version or "", scope, receive, send)
        await answered(served, triton_response, scope, receive, send)

    async def _serve(self, model: TensorModel, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        async with content_of(scope, receive, self._context.settings, self._room, compressed=False) as raw:
            request = await in_thread_if(len(raw) > INLINE_BYTES, lambda: _parse(raw, model, version))
            if self._stream:
                await while_connected(scope, receive, _events(model, request, send))
            else:
                await send_json(send, await while_connected(scope, receive, _only(model, request)))


def _parse(raw: bytes, model: TensorModel, version: str) -> InferRequest:
    return triton_generate.parse(parse_json(raw, object_pairs_hook=triton_generate.Pairs), model, version)


async def _only(model: TensorModel, request: InferRequest) -> bytes:
    """The one response; a second one ends the request."""
    found: bytes | None = None
    async with closing(model.infer(request)) as responses:
        async for response in responses:
            if triton_generate.is_flag_only(model, response):
                continue
            if found is not None:
                raise GenerationFailedError(triton_generate.NOT_ONE_RESPONSE)
            found = await _written(response)
    if found is None:
        raise GenerationFailedError(triton_generate.NOT_ONE_RESPONSE)
    return found


async def _events(model: TensorModel, request: InferRequest, send: Send) -> None:
    """One event a response. Status and headers wait for the first one, which may be an error of the model's own."""
    stream = EventStream(send, content_type=CONTENT_TYPE)
    try:
        async with closing(model.infer(request)) as responses:
            async for response in responses:
                if not triton_generate.is_flag_only(model, response):
                    await _send(stream, await _written(response))
    except ClientDisconnected:
        raise
    except Exception as error:  # whatever fails after the first event must be told in the stream
        if not stream.started:
            if not isinstance(error, ModelExecutionError):
                raise
            stream = EventStream(send, status=status_for(error), content_type=CONTENT_TYPE)
        await _send(stream, triton_body(error))
    await stream.start()
    await stream.end()


async def _written(response: InferResponse) -> bytes:
    return await in_thread_if(larger_than(response.outputs, INLINE_BYTES), lambda: triton_generate.write(response))


async def _send(stream: EventStream, event: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await stream.event(event)
    except TimeoutError:
        # The client does not read: leaving the response open makes the server close the connection.
        raise ClientDisconnected from None
