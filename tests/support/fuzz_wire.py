"""A client of a server under fire: it sends anything, holds what comes back to the rules, and looks for what grows."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import psutil

from support.grpc_client import ints
from support.server_process import ServerProcess
from tengserve_adapter.grpc.schema import INFERENCE, Message, message_class, schema

ANSWER_S = 60.0
"""Within it everything is answered; a busy machine takes a while."""
SETTLE_S = 30.0
MAX_ERROR_BYTES = 4096

_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_POLL = "failed to poll from model repository"
"""What Triton's clients look for when there is no such model; it comes with Triton's own code, INTERNAL."""
_GAUGE = re.compile(r"^tengserve_(running_requests|waiting_requests)\{[^}]*\} (\S+)$", re.MULTILINE)
_BLOCKS = re.compile(r"^tengserve_kv_cache_(free_blocks|idle_blocks|blocks)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server uses.

    Attributes:
        resident: bytes of memory.
        files: that are open, sockets too.
        threads: of the process.
    """

    resident: int
    files: int
    threads: int


class Wire:
    """Connections to a server over HTTP and gRPC.

    Attributes:
        seen: answers by family and outcome.
    """

    def __init__(self, server: ServerProcess, secret: str) -> None:
        """Connect.

        Args:
            server: is ready.
            secret: what no client may read, such as where the models are.
        """
        self.seen: Counter[str] = Counter()
        self._server = server
        self._secret = secret
        self._process = psutil.Process(server.process.pid)
        self._http = httpx.Client(base_url=server.url, timeout=ANSWER_S)
        self._channel = grpc.insecure_channel(server.grpc_address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._channel.close()

    def rpc(self, service: str, method: str, data: bytes) -> Message | None:
        """The response of a unary RPC to these bytes; None when they are refused, as they may be."""
        (response,) = self.rpcs(service, [(method, data)])
        return response

    def rpcs(self, service: str, calls: Sequence[tuple[str, bytes]]) -> list[Message | None]:
        """The same of several calls at once, each a method and its bytes."""
        started = [(method, self._unary(service, method).future(data, timeout=ANSWER_S)) for method, data in calls]
        return [self._response(method, call) for method, call in started]

    def stream(self, requests: Sequence[bytes]) -> list[Message]:
        """All that a stream answers to these requests."""
        responses = list(self._stream(requests))
        for response in responses:
            self._check_text(response.error_message)
            self.seen[f"stream {'error' if response.error_message else 'response'}"] += 1
        return responses

    def leave_stream(self, requests: Sequence[bytes], after: int) -> None:
        """Cancel a stream after so many of its responses."""
        call = self._stream(requests)
        for _ in range(after):
            if next(call, None) is None:
                break
        call.cancel()
        self.seen["stream left"] += 1

    def http(self, method: str, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
        """The response over HTTP."""
        # Not relative: httpx takes no path with two slashes then.
        response = self._http.request(method, self._server.url + path, content=content, headers=headers)
        self.seen[f"http {response.status_code}"] += 1
        assert response.status_code < 500 or response.status_code == 501, (response.status_code, response.text)
        if response.status_code >= 400 and method != "HEAD":
            self._check_text(response.text)
        return response

    def leave_http(self, path: str, content: bytes) -> None:
        """Close the connection after the headers of the response."""
        with httpx.stream("POST", self._server.url + path, content=content, timeout=ANSWER_S):
            self.seen["http left"] += 1
        self.seen["http left"] += 1

    def bytes_to(self, data: bytes, *, to_grpc: bool) -> None:
        """Send bytes, close this side and read to the end, which must come."""
        address = self._server.grpc_address if to_grpc else self._server.url.removeprefix("http://")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except TimeoutError:
                raise AssertionError(f"no end comes after {data!r}") from None
            except OSError:
                pass  # The server closed first.
        self.seen["bytes to gRPC" if to_grpc else "bytes to HTTP"] += 1

    def check_good(self, model: str, elements: int) -> None:
        """A request of good will, large enough to find what the server still holds of others, is answered."""
        request = ints(model, "good", *([7] * elements))
        response = self.rpc(INFERENCE, "ModelInfer", request.SerializeToString())
        assert response is not None, "a good request was refused over gRPC"
        (raw,) = request.raw_input_contents
        assert response.raw_output_contents[0] == raw
        (streamed,) = self.stream([request.SerializeToString()])
        assert streamed.infer_response.raw_output_contents[0] == raw
        tensor = {"name": "IN", "datatype": "INT32", "shape": [elements], "data": [7] * elements}
        answer = self._http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == tensor["data"]

    def usage(self, enough: Callable[[Usage], bool] = lambda usage: True) -> Usage:
        """What the server uses once nothing runs; fails when something goes on running.

        Args:
            enough: waited for, as long as a connection may take to be closed.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            assert self._server.process.poll() is None, self._server.printed
            metrics = self._http.get("/metrics").text
            running = {name: float(value) for name, value in _GAUGE.findall(metrics)}
            blocks = {name: float(value) for name, value in _BLOCKS.findall(metrics)}
            idle = not any(running.values()) and blocks["free_blocks"] + blocks["idle_blocks"] == blocks["blocks"]
            with self._process.oneshot():
                memory, files = self._process.memory_info().rss, self._process.num_fds()
                usage = Usage(memory, files, self._process.num_threads())
            if idle and enough(usage):
                return usage
            if time.monotonic() > deadline:
                assert idle, (running, blocks)
                return usage

    def _unary(self, service: str, method: str) -> Any:
        kind = message_class(schema().service(service).methods_by_name[method].output_type)
        return self._channel.unary_unary(f"/{service}/{method}", None, kind.FromString)

    def _response(self, method: str, call: Any) -> Message | None:
        try:
            response = call.result()
        except grpc.RpcError as error:
            self._check_status(method, error)
            return None
        self.seen[f"{method} OK"] += 1
        return response

    def _stream(self, requests: Sequence[bytes]) -> Any:
        kind = schema().messages["ModelStreamInferResponse"]
        call = self._channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer", None, kind.FromString)
        return call(iter(requests), timeout=ANSWER_S)

    def _check_status(self, method: str, error: Any) -> None:
        code, text = error.code(), error.details() or ""
        self.seen[f"{method} {code.name}"] += 1
        assert code in _CODES or (code is grpc.StatusCode.INTERNAL and text.endswith(_POLL)), (code, text)
        self._check_text(text)

    def _check_text(self, text: str) -> None:
        assert len(text.encode()) <= MAX_ERROR_BYTES
        assert "Traceback" not in text
        assert self._secret not in text
