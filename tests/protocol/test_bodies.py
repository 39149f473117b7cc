"""Bodies meant to crash the server: each gets a small JSON error, and the next request is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from support.asgi import RawConnection, app_with, client_of, served
from support.fake_engine import FakeEngine
from tengserve_adapter.http.settings import HttpSettings

PATHS = ["/infer", "/infer_token", "/v2/models/smollm2/generate", "/v2/models/smollm2/generate_stream"]
DEEP = 200_000

BAD = {
    "empty": b"",
    "space": b"  \n",
    "array": b"[]",
    "number": b"1",
    "string": b'"inputs"',
    "null": b"null",
    "true": b"true",
    "cut": b'{"inputs":"a"',
    "two": b'{"inputs":"a"}{"inputs":"b"}',
    "comma": b'{"inputs":"a",}',
    "comment": b'{"inputs":"a"/* */}',
    "single quotes": b"{'inputs':'a'}",
    "nan": b'{"inputs":"a","parameters":{"temperature":NaN}}',
    "infinity": b'{"inputs":"a","parameters":{"temperature":Infinity}}',
    "minus infinity": b'{"inputs":"a","parameters":{"temperature":-Infinity}}',
    "latin1": '{"inputs":"caf\u00e9"}'.encode("latin-1"),
    "utf16": '{"inputs":"a"}'.encode("utf-16"),
    "utf8 surrogate": '{"inputs":"a\ud800"}'.encode("utf-8", "surrogatepass"),
    "half a character": b'{"inputs":"a\\ud800","text_input":"a"}',
    "half a character, the other half": b'{"inputs":"a","input_id":[1],"text_input":"a","stop":"\\uDE00\\uD83D"}',
    "half a character in a name": b'{"inputs":"a","text_input":"a","\\\\\\ud800":1}',
    "bom": b'\xef\xbb\xbf{"inputs":"a"}',
    "zero bytes": b"\x00" * 100,
    "control": b'{"inputs":"a\x01"}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "deep arrays": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep, closed": b'{"inputs":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep, unknown field": b'{"inputs":"a","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep, small": b'{"inputs":"a","x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "digits": b'{"inputs":"a","parameters":{"seed":' + b"9" * 100_000 + b"}}",
    "deep parameter": b'{"inputs":"a","input_id":[1],"text_input":"a","parameters":' + b"[" * 500 + b"]" * 500 + b"}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD)
async def test_bad_body(path: str, name: str) -> None:
    engine = FakeEngine()
    async with client_of(app_with(engine)) as client:
        response = await client.post(path, content=BAD[name])
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/json"
        assert len(response.content) < 4096
        error = response.json()
        assert list(error) == ["error", "error_type"]
        assert "Traceback" not in error["error"]
        assert ".py" not in error["error"]
        good = await client.post("/infer", json={"inputs": "a"})
        assert good.status_code == 200


async def test_a_long_value_is_shortened_in_the_error() -> None:
    long = "\x01é" * 100_000
    async with client_of(app_with(FakeEngine())) as client:
        for body in (
            {"inputs": "a", "stream": long},
            {"inputs": "a", "parameters": {"temperature": long}},
            {"inputs": "a", "parameters": {"seed": 10**4000}},
            {"inputs": "a", "parameters": {"stop": [{}] * 5 + [long]}},
            {"input_id": [long]},
        ):
            response = await client.post("/infer", json=body)
            assert response.status_code == 422
            assert len(response.content) < 1024


async def test_depth_is_bounded_at_64() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for depth, expected in ((63, 200), (64, 422)):
            for left, right in (("[", "]"), ('{"a":', "}")):
                nested = left * depth + "1" + right * depth
                response = await client.post("/infer", content=f'{{"inputs":"[[","x":{nested}}}')
                assert response.status_code == expected
        response = await client.post("/infer", json={"inputs": "[{" * 1000, "x": [[]] * 100})
        assert response.status_code == 200


@pytest.mark.parametrize("unit", [b"[],", b"1,", b'"[",', b'"\\"",', b'"\\\\",', b'{"a":1},'], ids=bytes.decode)
async def test_the_number_of_values_is_bounded(unit: bytes) -> None:
    """Otherwise such a body costs a gigabyte and stops every stream for seconds."""
    body = b'{"inputs":"a","x":[' + unit * 1_200_000 + b"1]}"
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post("/infer", content=body)
    assert response.status_code == 422
    assert "more than 1114112 values" in response.json()["error"]


@pytest.mark.parametrize("text", [",", "[", "{", '",', '\\",', "\\[", '"[', '\\"{'])
async def test_a_prompt_may_hold_any_number_of_commas_and_brackets(text: str) -> None:
    engine = FakeEngine()
    prompt = text * (4_194_304 // len(text))
    async with client_of(app_with(engine)) as client:
        response = await client.post("/infer", json={"inputs": prompt, "parameters": {"stop": ['"', "\\"]}})
        assert response.status_code == 200
        response = await client.post("/infer", content=b'{"inputs":"' + text.encode() * 500_000)
        assert response.status_code == 422
    assert engine.requests[0].prompt == prompt


async def test_odd_but_right_bodies() -> None:
    engine = FakeEngine()
    async with client_of(app_with(engine)) as client:
        for content in (
            b'{"inputs":"first","inputs":"last"}',
            b'{"inputs":"last","n":123456789012345678901234567890,"x":1e400,"y":"\\ud83d\\ude00 \\\\ud800"}',
            b' \r\n{"inputs" : "l\\u0061st"}\n',
            b'{"inputs":"last","parameters":{"seed":18446744073709551615}}',
        ):
            assert (await client.post("/infer", content=content)).status_code == 200, content
    assert {request.prompt for request in engine.requests} == {"last"}
    assert engine.requests[-1].sampling.seed == 18446744073709551615


@pytest.mark.parametrize(
    "content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "?"]
)
async def test_the_content_type_does_not_matter(content_type: str) -> None:
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post("/infer", content=b'{"inputs":"a"}', headers={"content-type": content_type})
    assert response.status_code == 200


async def test_compressed_bodies_are_refused() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post("/infer", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert response.status_code == 422
    assert "Content-Encoding" in response.json()["error"]


async def test_a_big_body_is_parsed_whole() -> None:
    engine = FakeEngine()
    async with client_of(app_with(engine)) as client:
        response = await client.post("/infer", json={"inputs": "é" * 1_000_000})
        assert response.status_code == 200
        response = await client.post("/infer", content=b'{"inputs":"' + b"x" * 1_000_000)
        assert response.status_code == 422
    assert engine.requests[0].prompt == "é" * 1_000_000


async def test_too_large_by_declaration_and_by_stream() -> None:
    settings = HttpSettings(max_body_bytes=1000)
    prefix, suffix = b'{"inputs":"', b'"}'
    exact = prefix + b"x" * (1000 - len(prefix) - len(suffix)) + suffix

    async def streamed(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b"x" * 100

    async with client_of(app_with(FakeEngine(), settings=settings)) as client:
        assert (await client.post("/infer", content=exact)).status_code == 200
        for content in (exact + b" ", streamed(1100)):
            response = await client.post("/infer", content=content)
            assert response.status_code == 413
            assert response.json()["error"] == "Request body too large. At most 1000 bytes are allowed."


async def test_an_absurd_content_length_is_answered_without_reading() -> None:
    async with served(app_with(FakeEngine())) as port, RawConnection.to(port) as connection:
        await connection.send(b"POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999\r\n\r\n{")
        async with asyncio.timeout(20):
            assert (await connection.head()).startswith("HTTP/1.1 413 ")


async def test_a_body_that_never_arrives() -> None:
    settings = HttpSettings(body_timeout_s=0.05)
    async with served(app_with(FakeEngine(), settings=settings)) as port, RawConnection.to(port) as connection:
        await connection.send(b"POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(20):
            assert (await connection.head()).startswith("HTTP/1.1 408 ")


async def test_a_client_that_leaves_while_it_sends_is_forgotten() -> None:
    engine = FakeEngine()
    async with served(app_with(engine)) as port:
        async with RawConnection.to(port) as connection:
            await connection.send(b'POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{"inputs"')
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert (await client.post("/infer", json={"inputs": "a"})).status_code == 200
    assert len(engine.requests) == 1
