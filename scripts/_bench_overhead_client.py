"""The client of `scripts/bench overhead`: measures what each line of stdin asks for, and answers with a line of JSON.

It is made to cost little, and the same for every server: it sends the same bytes again and again, over connections that
stay open, and looks at no more of an answer than its length and whether it is the expected one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import grpc
import numpy as np
import uvloop
from _bench_overhead_figures import Sample, sample

from tengserve_adapter.grpc.schema import schema

_MODEL = "identity"
_TIMEOUT_S = 30.0
_WARM_UP = 5
"""Answers on each connection before anything is counted."""

Exchange = Callable[[], Awaitable[bytes]]
"""One request; returns what is compared of the answer."""


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection that sends one request at a time."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            body = body_of(self._received)
        except ValueError as error:
            self._fail(str(error))
            return
        if body is not None and self._answer is not None:
            self._received.clear()
            self._answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")

    def exchange(self) -> asyncio.Future[bytes]:
        """Send the request; its answer's body."""
        self._answer = self._loop.create_future()
        self._transport.write(self._request)
        return self._answer

    def close(self) -> None:
        """Close the connection."""
        self._answer = None
        self._transport.close()

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(SystemExit(reason))


def body_of(received: bytearray) -> bytes | None:
    """The body of an answer; None while it is not complete. Stock KServe sends binary tensors in chunks.

    Raises:
        ValueError: it is no answer with the status 200.
    """
    start = received.find(b"\r\n\r\n") + 4
    if start < 4:
        return None
    head = bytes(received[:start]).lower()
    if b" 200 " not in head[: head.index(b"\r\n")]:
        raise ValueError(f"the answer is {head!r} {bytes(received[start:])[:500]!r}")
    _, found, rest = head.partition(b"\r\ncontent-length:")
    if found:
        end = start + int(rest[: rest.index(b"\r\n")])
        return bytes(received[start:end]) if len(received) >= end else None
    chunks = []
    while (line_end := received.find(b"\r\n", start)) >= 0:
        size = int(received[start:line_end], 16)
        start = line_end + 2 + size + 2
        if len(received) < start:
            return None
        if size == 0:
            return b"".join(chunks)
        chunks.append(bytes(received[line_end + 2 : start - 2]))
    return None


def _values(elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(7).standard_normal((1, elements), np.float32)


def _http_request(route: str, address: str, elements: int) -> bytes:
    """As tritonclient writes it."""
    values = _values(elements)
    entry: dict[str, object] = {"name": "INPUT", "shape": [1, elements], "datatype": "FP32"}
    output: dict[str, object] = {"name": "OUTPUT", "parameters": {"binary_data": route == "binary"}}
    tail = b""
    headers = ""
    if route == "binary":
        tail = values.tobytes()
        entry["parameters"] = {"binary_data_size": len(tail)}
    else:
        entry["data"] = values.reshape(-1).tolist()
    head = json.dumps({"id": "1", "inputs": [entry], "outputs": [output]}, separators=(",", ":")).encode()
    if route == "binary":
        headers = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Type: application/octet-stream\r\n"
    else:
        headers = "Content-Type: application/json\r\n"
    size = len(head) + len(tail)
    start = f"POST /v2/models/{_MODEL}/infer HTTP/1.1\r\nHost: {address}\r\nContent-Length: {size}\r\n{headers}\r\n"
    return start.encode() + head + tail


def _check_http(route: str, elements: int, body: bytes) -> None:
    answer, offset = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    (output,) = answer["outputs"]
    data = output["data"] if route == "json" else np.frombuffer(body[offset:], np.float32)
    _check_output(elements, output["name"], output["datatype"], output["shape"], data)


def _grpc_request(elements: int) -> bytes:
    message = schema().messages["ModelInferRequest"](model_name=_MODEL, id="1")
    message.inputs.add(name="INPUT", datatype="FP32", shape=[1, elements])
    message.raw_input_contents.append(_values(elements).tobytes())
    data: bytes = message.SerializeToString()
    return data


def _check_grpc(elements: int, body: bytes) -> None:
    message = schema().messages["ModelInferResponse"].FromString(body)
    (output,), (raw,) = message.outputs, message.raw_output_contents
    _check_output(elements, output.name, output.datatype, output.shape, np.frombuffer(raw, np.float32))


def _check_output(elements: int, name: str, datatype: str, shape: Sequence[int], data: Any) -> None:
    expected = _values(elements)
    same = np.array_equal(np.array(data, np.float32).reshape(-1), expected.reshape(-1))
    if (name, datatype, list(shape)) != ("OUTPUT", "FP32", [1, elements]) or not same:
        raise SystemExit(f"the answer is not the tensor that was sent: {name} {datatype} {list(shape)}")


async def _exchanges(
    stack: AsyncExitStack, server: dict[str, str], route: str, elements: int, concurrency: int
) -> list[Exchange]:
    """As many ways to send a request as there are to be at once; each was used before."""
    if route == "grpc":
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server["grpc"]))
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = _grpc_request(elements)
        return [lambda: call(request)] * concurrency
    request = _http_request(route, server["http"], elements)
    host, _, port = server["http"].rpartition(":")
    exchanges: list[Exchange] = []
    for _ in range(concurrency):
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(request), host, int(port)
        )
        stack.callback(connection.close)
        exchanges.append(connection.exchange)
    return exchanges


async def _warmed_up(exchange: Exchange) -> bytes:
    """The answer to expect."""
    expected = await exchange()
    for _ in range(_WARM_UP):
        _compare(await exchange(), expected)
    return expected


async def _load(exchange: Exchange, expected: bytes, end: float, latencies_s: list[float]) -> None:
    now = time.perf_counter()
    while now < end:
        answer = await exchange()
        began, now = now, time.perf_counter()
        _compare(answer, expected)
        latencies_s.append(now - began)


def _compare(answer: bytes, expected: bytes) -> None:
    if answer != expected:
        raise SystemExit("an answer differs from the others")


async def measure(server: dict[str, str], route: str, elements: int, concurrency: int, seconds: float) -> Sample:
    """One measurement; see Case and Sample."""
    async with AsyncExitStack() as stack:
        exchanges = await _exchanges(stack, server, route, elements, concurrency)
        async with asyncio.timeout(_TIMEOUT_S):
            expected = await asyncio.gather(*map(_warmed_up, exchanges))
        for body in expected:
            _compare(body, expected[0])
        if route == "grpc":
            _check_grpc(elements, expected[0])
        else:
            _check_http(route, elements, expected[0])
        latencies_s: list[float] = []
        start = time.perf_counter()
        async with asyncio.timeout(seconds + _TIMEOUT_S):
            loads = (_load(exchange, expected[0], start + seconds, latencies_s) for exchange in exchanges)
            await asyncio.gather(*loads)
        return sample(latencies_s, time.perf_counter() - start)


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(json.dumps(asdict(runner.run(measure(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
