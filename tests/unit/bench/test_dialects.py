"""What each dialect sends and what it reads out of an event."""

from __future__ import annotations

from typing import Any

import pytest

from tengserve_adapter.bench.dialects import HTTP_DIALECTS
from tengserve_adapter.bench.requests import Chunk, Prompt, Request, with_fields
from tengserve_adapter.bench.systems import DIALECTS, targets
from tengserve_backend.errors import ConfigurationError

REQUEST = Request(Prompt("The time", (5, 6)), 7)
NATIVE = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 7, "details": True}
OPENAI = {
    "model": "m",
    "max_tokens": 7,
    "temperature": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("infer", "/infer", {"inputs": "The time", "stream": True, "parameters": NATIVE}),
        ("infer_token", "/infer_token", {"input_id": (5, 6), "stream": True, "parameters": NATIVE}),
        (
            "generate_stream",
            "/v2/models/m/generate_stream",
            {"text_input": "The time", "parameters": NATIVE, "return_num_input_tokens": True},
        ),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "The time"}]} | OPENAI),
        ("completions", "/v1/completions", {"prompt": "The time"} | OPENAI),
        ("completions_ids", "/v1/completions", {"prompt": (5, 6)} | OPENAI),
    ],
)
def test_requests(name: str, path: str, body: dict[str, Any]) -> None:
    dialect = HTTP_DIALECTS[name]
    assert dialect.path("m") == path
    assert dialect.body(REQUEST, "m") == body


def test_a_servers_own_fields() -> None:
    body = HTTP_DIALECTS["completions"].body(REQUEST, "m")
    assert with_fields(body, {"model": "n", "ignore_eos": None, "eos": -1}) == {
        "prompt": "The time",
        "model": "n",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "eos": -1,
    }


@pytest.mark.parametrize(
    ("name", "event", "chunk"),
    [
        ("infer", {"prefill_time": 1.0, "token": {"id": 9, "text": "a"}}, Chunk("a", (9,))),
        ("infer_token", {"decode_time": 1.0, "token": {"id": [9], "text": ""}}, Chunk("", (9,))),
        (
            "infer",
            {"generated_text": "ab", "details": {"generated_tokens": 2}, "token": {"id": 8, "text": None}},
            Chunk("", (8,), "ab", None, 2),
        ),
        ("generate_stream", {"text_output": "a", "details": {"generated_tokens": 1}}, Chunk("a")),
        (
            "generate_stream",
            {
                "text_output": "b",
                "num_input_tokens": 4,
                "details": {"generated_tokens": 2, "finish_reason": "length"},
            },
            Chunk("b", (), None, 4, 2),
        ),
        ("chat", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk()),
        ("chat", {"choices": [{"delta": {"content": "a"}, "finish_reason": None}], "usage": None}, Chunk("a")),
        ("chat", {"choices": [{"delta": {"content": None}, "finish_reason": "length"}]}, Chunk()),
        ("chat", {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}, Chunk("", (), None, 4, 2)),
        ("completions", {"choices": [{"text": "a"}]}, Chunk("a")),
        ("completions_ids", {"choices": [{"text": "a"}]}, Chunk("a")),
    ],
)
def test_events(name: str, event: Any, chunk: Chunk) -> None:
    assert HTTP_DIALECTS[name].chunk(event) == chunk


def named(url: str = "http://h:1", against: tuple[str, ...] = (), fields: tuple[str, ...] = ()) -> list[Any]:
    return targets(url, "ours", "infer_token", against, "completions", fields)


def test_servers_of_a_command_line() -> None:
    found = named("grpc+http://h:1", ("a=http://h:2", "b=chat+https://h:3/x"), ('a={"model": "n"}',))
    assert [(one.name, one.dialect, one.url, dict(one.fields)) for one in found] == [
        ("ours", "grpc", "http://h:1", {}),
        ("a", "completions", "http://h:2", {"model": "n"}),
        ("b", "chat", "https://h:3/x", {}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "h:1"}, r"--url must have a URL, \[DIALECT\+\]http://HOST:PORT with one of infer, .*, got 'h:1'"),
        ({"url": "soap+http://h:1"}, "--url must have a URL"),
        ({"against": ("http://h:2",)}, "--against must be NAME="),
        ({"against": ("ours=http://h:2",)}, "each NAME once"),
        ({"against": ("a=nothing",)}, "--against must have a URL"),
        ({"fields": ("a={}",)}, r"a server's name \(ours\)"),
        ({"fields": ("ours=[]",)}, "a JSON object"),
        ({"fields": ("ours={",)}, "a JSON object"),
    ],
)
def test_mistakes_name_the_flag(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        named(**arguments)


def test_every_dialect_is_known_by_name() -> None:
    assert (*HTTP_DIALECTS, "grpc") == DIALECTS
