"""How each API is asked and how its events are read. A dialect over HTTP is two functions and no more.

Every request is greedy, streams, and goes on past an end-of-sequence token. `ignore_eos` in OpenAI's API is what vLLM
and llama.cpp call it; a server that knows it by another name is told through its system's own fields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tengserve_adapter.bench import http
from tengserve_adapter.bench.requests import AnswerError, Chunk, Request, with_fields


class Ask(Protocol):
    """Sends requests to one server."""

    def __call__(self, request: Request) -> AsyncIterator[Chunk]:
        """Send one; its answer, piece by piece.

        Raises:
            AnswerError: it was not answered, or not wholly.
        """
        ...


@dataclass(frozen=True, slots=True)
class HttpDialect:
    """An API over HTTP with server-sent events.

    Attributes:
        name: for the command line.
        what: one sentence.
        path: of the API, for a model.
        body: of a request, for a model.
        chunk: what an event says.
        templated: whether the server puts the prompt into a chat template, so that the model sees another one.
    """

    name: str
    what: str
    path: Callable[[str], str]
    body: Callable[[Request, str], dict[str, Any]]
    chunk: Callable[[Any], Chunk]
    templated: bool = False


def http_ask(dialect: HttpDialect, place: http.Place, model: str, fields: Mapping[str, Any]) -> Ask:
    """A way to ask one server.

    Args:
        dialect: that it speaks.
        place: where it is.
        model: that is asked.
        fields: of the body; see `with_fields`.
    """

    async def ask(request: Request) -> AsyncIterator[Chunk]:
        body = with_fields(dialect.body(request, model), fields)
        async for event in http.post_events(place, dialect.path(model), body):
            if isinstance(event, dict) and event.get("error"):
                raise AnswerError(f"the answer ends with an error: {str(event['error'])[:500]}")
            try:
                chunk = dialect.chunk(event)
            except (KeyError, TypeError, IndexError, AttributeError):
                raise AnswerError(f"this is no event of {dialect.name}: {str(event)[:500]}") from None
            yield chunk

    return ask


def _native_parameters(request: Request) -> dict[str, Any]:
    return {"do_sample": False, "ignore_eos": True, "max_new_tokens": request.output_tokens, "details": True}


def _infer_body(request: Request, _: str) -> dict[str, Any]:
    return {"inputs": request.prompt.text, "stream": True, "parameters": _native_parameters(request)}


def _infer_token_body(request: Request, _: str) -> dict[str, Any]:
    return {"input_id": request.prompt.ids, "stream": True, "parameters": _native_parameters(request)}


def _native_chunk(event: Any) -> Chunk:
    token = event["token"]
    ids = token["id"] if isinstance(token["id"], list) else [token["id"]]
    details = event.get("details") or {}
    return Chunk(token["text"] or "", tuple(ids), event.get("generated_text"), None, details.get("generated_tokens"))


def _generate_body(request: Request, _: str) -> dict[str, Any]:
    parameters = _native_parameters(request)
    return {"text_input": request.prompt.text, "parameters": parameters, "return_num_input_tokens": True}


def _generate_chunk(event: Any) -> Chunk:
    details = event.get("details") or {}
    done = details.get("finish_reason") is not None
    count = details.get("generated_tokens") if done else None
    return Chunk(event["text_output"], (), None, event.get("num_input_tokens"), count)


def _openai(request: Request, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def _chat_body(request: Request, model: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": request.prompt.text}]} | _openai(request, model)


def _completions_body(request: Request, model: str) -> dict[str, Any]:
    return {"prompt": request.prompt.text} | _openai(request, model)


def _completions_ids_body(request: Request, model: str) -> dict[str, Any]:
    return {"prompt": request.prompt.ids} | _openai(request, model)


def _openai_chunk(event: Any) -> Chunk:
    usage = event.get("usage") or {}
    text = ""
    for choice in event.get("choices") or ():
        text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
    return Chunk(text, (), None, usage.get("prompt_tokens"), usage.get("completion_tokens"))


HTTP_DIALECTS: Final = {
    dialect.name: dialect
    for dialect in (
        HttpDialect("infer", "MindIE's /infer: text", lambda _: "/infer", _infer_body, _native_chunk),
        HttpDialect(
            "infer_token", "MindIE's /infer_token: ids", lambda _: "/infer_token", _infer_token_body, _native_chunk
        ),
        HttpDialect(
            "generate_stream",
            "v2 generate_stream: text",
            lambda model: f"/v2/models/{model}/generate_stream",
            _generate_body,
            _generate_chunk,
        ),
        HttpDialect(
            "chat",
            "OpenAI's /v1/chat/completions: text in the server's chat template",
            lambda _: "/v1/chat/completions",
            _chat_body,
            _openai_chunk,
            templated=True,
        ),
        HttpDialect(
            "completions",
            "OpenAI's /v1/completions: text",
            lambda _: "/v1/completions",
            _completions_body,
            _openai_chunk,
        ),
        HttpDialect(
            "completions_ids",
            "the same with ids in place of text",
            lambda _: "/v1/completions",
            _completions_ids_body,
            _openai_chunk,
        ),
    )
}

GRPC: Final = "grpc"
"""The dialect that is not over HTTP: v2 ModelStreamInfer, ids, through tritonclient."""
