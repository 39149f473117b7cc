"""v2 infer: `POST /v2/models/{m}[/versions/{v}]/infer`, for models of tensors, LLMs, and MindIE's token infer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tengserve_adapter.http.answer import whole_answer
from tengserve_adapter.http.body import INLINE_BYTES
from tengserve_adapter.http.disconnect import while_connected
from tengserve_adapter.http.edge import answered
from tengserve_adapter.http.encoding import accepted, compress
from tengserve_adapter.http.endpoints import Context, count_ignored
from tengserve_adapter.http.errors import response_for
from tengserve_adapter.http.tensor_body import HEAD_LENGTH, ContentRoom, TensorBody, content_of, in_thread_if, split
from tengserve_adapter.http.triton_errors import triton_response
from tengserve_adapter.protocols import infer, mindie_infer
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import (
    ShuttingDownError,
    TengserveError,
    UnsupportedError,
)
from tengserve_backend.inference import InferRequest, InferResponse, TensorModel
from tengserve_backend.inference.llm import LlmTensorModel
from tengserve_backend.inference.request import larger_than
from tengserve_backend.inference.unary import infer_once

LABEL: Final = "/v2/models/{model}/infer"
_HEAD_LENGTH_HEADER: Final = "Inference-Header-Content-Length"


def find_model(context: Context, name: str, version: str | None) -> TensorModel:
    """The model of a URL.

    Raises:
        ShuttingDownError: nothing new is taken.
        ModelNotFoundError, ModelNotReadyError: it cannot serve.
    """
    if context.draining():
        raise ShuttingDownError("Server not ready: it is stopping and takes no new requests.")
    return context.tensor_model(name, version)


class InferEndpoint:
    """An ASGI endpoint: socket to InferRequest, InferResponse to socket."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._room = ContentRoom(context.settings.max_held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing is raised but cancellation."""
        await answered(self._answer(scope, receive, send), _respond, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._serve(Request(scope), scope, receive)
        await response(scope, receive, send)

    async def _serve(self, request: Request, scope: Scope, receive: Receive) -> Response:
        version: str | None = request.path_params.get("version")
        model = find_model(self._context, request.path_params["model"], version)
        settings = self._context.settings
        if settings.strict_decoupled and model.decoupled and not isinstance(model, LlmTensorModel):
            raise _refuses_decoupled()
        async with content_of(scope, receive, settings, self._room, compressed=True) as content:
            head_length = request.headers.get(HEAD_LENGTH)
            large = len(content) > INLINE_BYTES
            body = await in_thread_if(large, lambda: split(content, head_length))
            if isinstance(model, LlmTensorModel) and not body.tail and mindie_infer.is_token_infer(body.head):
                return await self._token_infer(model.engine, body, scope, receive)
            if settings.strict_decoupled and model.decoupled:
                raise _refuses_decoupled()
            parsed, wishes = await in_thread_if(large, lambda: _parse(model, version or "", body))
            if settings.forwarded_headers is not None:
                parsed = settings.forwarded_headers.added_to(parsed, model, _headers(scope))
            response = await while_connected(scope, receive, infer_once(model, parsed))
        large = larger_than(response.outputs, INLINE_BYTES)
        accept = request.headers.get("accept-encoding", "")
        return await in_thread_if(large, lambda: _written(model, parsed, response, wishes, accept))

    async def _token_infer(self, engine: Engine, body: TensorBody, scope: Scope, receive: Receive) -> Response:
        """Like every MindIE endpoint, errors included."""
        try:
            call = mindie_infer.parse(body.head, engine.info, request_id=uuid.uuid4().hex)
            count_ignored(LABEL, call.ignored)
            events = await while_connected(scope, receive, whole_answer(engine, call.request))
        except TengserveError as error:
            return response_for(error)
        return Response(call.answer([event.token_id for event in events]), media_type="application/json")


def _respond(error: BaseException) -> Response:
    response = triton_response(error)
    if isinstance(error, UnsupportedError):
        response.headers["Accept-Encoding"] = "gzip, deflate"
    return response


def _refuses_decoupled() -> UnsupportedError:
    return UnsupportedError("HTTP end point doesn't support models with decoupled transaction policy")


def _headers(scope: Scope) -> Iterator[tuple[str, str]]:
    """By name, in lower case."""
    return ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in scope["headers"])


def _parse(model: TensorModel, version: str, body: TensorBody) -> tuple[InferRequest, infer.Wishes]:
    if body.raw:
        return infer.raw_request(model, version, body.tail)
    return infer.parse_request(model, version, body.head, body.tail)


def _written(
    model: TensorModel, request: InferRequest, response: InferResponse, wishes: infer.Wishes, accept_encoding: str
) -> Response:
    written = infer.write_response(response, infer.select(request, response, model), wishes)
    headers = {}
    media_type = "application/json"
    if written.head_bytes is not None:
        headers[_HEAD_LENGTH_HEADER] = str(written.head_bytes)
        media_type = "application/octet-stream"
    content = written.body
    encoding = accepted(accept_encoding)
    if encoding is not None:
        content = compress(encoding, content)
        headers["Content-Encoding"] = encoding.name
    return Response(content, headers=headers, media_type=media_type)
