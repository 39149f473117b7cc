"""One client's connection: the bounds and the manners that uvicorn's httptools protocol leaves open.

```
            first byte             head complete          body complete         answer complete
  IDLE ---------------> HEAD -------------------> BODY ------------------> IDLE ---------------> keep-alive
         HEAD_TIMEOUT_S, MAX_HEAD_BYTES        http/intake.py       the engine's deadline
                                               after an early answer: DISCARD_TIMEOUT_S
```

A client that ends its sending side (a TCP half-close, as `nc -N` does) has left: on the wire nothing tells it from one
that is gone, and an answer that nobody waits for must not occupy the engine.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tengserve_adapter.http.errors import (
    HeadTooLargeError,
    MalformedRequestError,
    TooManyConnectionsError,
    response_for,
)
from tengserve_adapter.http.sse import DIRECT_WRITER
from tengserve_adapter.http.transport import DISCARD_TIMEOUT_S, ClientTransport
from tengserve_backend.errors import TengserveError

_LOG = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0

KEEP_ALIVE_S: Final = 65
"""Longer than the idle timeout of Envoy and Istio (60 s): a proxy must not write to a connection that we close."""

MAX_PIPELINED: Final = 16
"""Requests that wait behind the one that is being answered. While there are more, nothing is read."""

MAX_CONNECTIONS: Final = 4096
SPARE_CONNECTIONS = 64
"""Connections beyond the limit that are still heard, so that probes are answered and clients are told. The rest are
closed unheard."""
SPARE_HEAD_TIMEOUT_S = 2.0
PROBES: Final = ("/v2/health/live", "/v2/health/ready", "/metrics")

_FRAMING: Final = (b"content-length", b"transfer-encoding", b"connection")
"""Headers that decide where a request ends."""


_Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Part(enum.Enum):
    """What of a request the next byte belongs to."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request head is bounded in size and in time, and which speaks nothing but HTTP/1.1.

    A head that is too large is answered with 431 and anything that is not HTTP with 400; a head that takes too long
    closes the connection. An offer to upgrade, to HTTP/2 or WebSocket, is ignored, as RFC 9110 section 7.8 allows.

    Beyond max_connections a connection is good for one probe, or for hearing 503.

    However a client leaves, the requests that it had sent are told so, and nothing that it does makes a log line.
    """

    transport: ClientTransport

    def __init__(self, *args: Any, max_connections: int = MAX_CONNECTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._spare = False
        self._part = _Part.IDLE
        self._head_bytes = 0
        self._unmoved_bytes = 0
        self._moved = False
        self._too_large = False
        self._repeats_head = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._refusal: TengserveError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and now owes a request head."""
        raw = cast("asyncio.Transport", transport)
        super().connection_made(ClientTransport(raw, self.loop, self._client_sends))
        self.flow = _Flow(self.transport, lambda: len(self.pipeline) > MAX_PIPELINED)
        self._spare = len(self.connections) > self._max_connections
        if len(self.connections) > self._max_connections + SPARE_CONNECTIONS:
            self.transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every request on it is told, not the last one alone."""
        self._stop_timer()
        self.transport.connection_lost()
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._leave(self._running)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends nothing more, so it has left; see the module's text."""
        self.transport.client_left()

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived. Those that bring a request no further are bounded, whatever they are."""
        self._unset_keepalive_if_required()
        if self._refusal is not None or self.transport.is_closing():
            return
        self._moved = False
        try:
            self._feed(memoryview(data))
            self._unmoved_bytes = 0 if self._moved else self._unmoved_bytes + len(data)
            self._check_size(self._unmoved_bytes)
        except (httptools.HttpParserError, _TooLargeError) as error:
            _LOG.debug("refused what %s sent: %s", self.client, error)
            self._refuse()
            return
        waits = self._timer is not None or self.timeout_keep_alive_task is not None
        if self._part is _Part.IDLE and self._answered() and not waits:
            # Blank lines between requests: they ended the keep-alive time, so that a request has to follow.
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request starts."""
        if self._repeats_head:
            return
        self._part = _Part.HEAD
        self._moved = True
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        if self._repeats_head:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer."""
        if self._repeats_head:
            return
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._repeats_head:
            return
        self._stop_timer()
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        super().on_headers_complete()
        self._part = _Part.BODY

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            # The parser takes what follows for another protocol; `_feed` makes it the body that it is.
            return
        self._moved = True
        self._part = _Part.IDLE
        super().on_message_complete()
        if self.cycle.response_complete:
            # It was answered before it was complete. Only now does the connection wait for the next one.
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """An answer is complete."""
        super().on_response_complete()
        if self.transport.is_closing() or not self._answered():
            return
        if self._refusal is not None:
            self._send_and_close(self._refusal)
        elif self._part is _Part.BODY:
            self._start_timer(DISCARD_TIMEOUT_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, functools.partial(self._run, cycle, app))

    async def _run(
        self, cycle: RequestResponseCycle, app: _Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request; a client that leaves meanwhile, however that shows, is nobody's failure."""
        if self._spare:
            cycle.keep_alive = False
            if scope["path"] not in PROBES:
                app = response_for(TooManyConnectionsError("Too many clients are connected."))
        scope.setdefault("extensions", {})[DIRECT_WRITER] = _ChunkWriter(cycle, self.transport)
        try:
            await app(scope, receive, _close_delimited(cycle) if scope["http_version"] == "1.0" else send)
        except asyncio.CancelledError:
            # The server ends and has waited long enough; there is no one to hand this on to.
            self._leave(cycle)
            self.transport.abort()
        except Exception as error:
            if not cycle.disconnected:
                raise
            _LOG.debug("after %s had left: %r", self.client, error)

    def _client_sends(self) -> bool:
        return self._part is not _Part.IDLE or self._refusal is not None

    def _answered(self) -> bool:
        return self._running is None or self._running.response_complete

    @staticmethod
    def _leave(cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            else:
                return

    def _ignore_upgrade(self) -> None:
        """Go on behind a head that offers an upgrade: a new parser gets the same head without the offer, unheard."""
        head = [self.parser.get_method() + b" / HTTP/" + self.parser.get_http_version().encode("ascii")]
        for name, value in self.headers:
            if name in _FRAMING:
                kept = (part for part in value.split(b",") if part.strip().lower() != b"upgrade")
                head.append(name + b": " + (b",".join(kept) if name == b"connection" else value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._repeats_head = True
        try:
            self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
        finally:
            self._repeats_head = False

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._check_size(self._head_bytes)

    def _check_size(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            self._too_large = True
            raise _TooLargeError("request head too large")

    def _refuse(self) -> None:
        error: TengserveError = MalformedRequestError("The request is not HTTP/1.1.")
        if self._too_large:
            error = HeadTooLargeError(f"The request head is too large. At most {MAX_HEAD_BYTES} bytes are allowed.")
        self._refusal = error
        self._stop_timer()
        if self._part is _Part.BODY and not self.cycle.response_complete:
            # What is wrong is the body of this request, so this is its answer.
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            elif self.cycle.response_started:
                self.transport.abort()
                return
            else:
                self._leave(self.cycle)
                self._send_and_close(error)
                return
        if self._answered():
            self._send_and_close(error)

    def _send_and_close(self, error: TengserveError) -> None:
        response = response_for(error)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in headers]
        status = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}\r\n".encode("ascii")
        self.transport.write(b"".join([status, *lines, b"\r\n", response.body]))
        self.transport.close()

    def _expect_head(self) -> None:
        self._start_timer(SPARE_HEAD_TIMEOUT_S if self._spare else HEAD_TIMEOUT_S)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timer, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, seconds: float) -> None:
        self._timer = None
        if self.flow.read_paused:
            # It is we who do not read: the client waits for earlier answers.
            self._start_timer(seconds)
        else:
            self.transport.abort()


def _close_delimited(cycle: RequestResponseCycle) -> Send:
    """A `send` for HTTP/1.0, which knows no chunks: an answer without a length ends with the connection."""
    unsized = False

    async def send(message: Message) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            unsized = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if unsized else None
        elif unsized:
            # uvicorn checks what is sent against what was announced: announced is what is sent.
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)  # type: ignore[arg-type]  # uvicorn's types and starlette's name the same messages

    return send


class _ChunkWriter:
    """See DirectWriter: chunks of a response that has begun and has not ended, to a client that keeps up."""

    def __init__(self, cycle: RequestResponseCycle, transport: ClientTransport) -> None:
        self._cycle = cycle
        self._transport = transport

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        # Every other case is for the cycle's own `send`, which waits, keeps still or says what is wrong.
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
        )

    def write(self, piece: bytes) -> None:
        self._transport.write_now(b"%x\r\n%b\r\n" % (len(piece), piece))


class _Flow(FlowControl):
    """uvicorn's flow control, in which nobody reads on behind too many requests."""

    def __init__(self, transport: asyncio.Transport, held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._held = held

    def resume_reading(self) -> None:
        if not self._held():
            super().resume_reading()


class _TooLargeError(ValueError):
    """More bytes than a request head may have; out of a parser's callback it comes as the parser's own error."""
