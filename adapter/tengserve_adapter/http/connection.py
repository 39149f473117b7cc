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
import logging
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tengserve_adapter.http.errors import HeadTooLargeError, MalformedRequestError, response_for
from tengserve_backend.errors import TengserveError

_LOG = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0

_FRAMING: Final = (b"content-length", b"transfer-encoding", b"connection")
"""Headers that decide where a request ends."""


class _Part(enum.Enum):
    """What of a request the next byte belongs to."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request head is bounded in size and in time, and which speaks nothing but HTTP/1.1.

    A head that is too large is answered with 431 and anything that is not HTTP with 400; a head that takes too long
    closes the connection. An offer to upgrade, to HTTP/2 or WebSocket, is ignored, as RFC 9110 section 7.8 allows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = _Part.IDLE
        self._head_bytes = 0
        self._unmoved_bytes = 0
        self._moved = False
        self._too_large = False
        self._repeats_head = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and now owes a request head."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and so is the wait for its head."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived. Those that bring a request no further are bounded, whatever they are."""
        self._unset_keepalive_if_required()
        self._moved = False
        try:
            self._feed(memoryview(data))
            self._unmoved_bytes = 0 if self._moved else self._unmoved_bytes + len(data)
            self._check_size(self._unmoved_bytes)
        except (httptools.HttpParserError, _TooLargeError) as error:
            _LOG.debug("refused what %s sent: %s", self.client, error)
            self._refuse()
            return
        answered = self.cycle is None or self.cycle.response_complete
        if self._part is _Part.IDLE and answered and self._timer is None and self.timeout_keep_alive_task is None:
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
        self._send_and_close(error)

    def _send_and_close(self, error: TengserveError) -> None:
        response = response_for(error)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in headers]
        status = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}\r\n".encode("ascii")
        self.transport.write(b"".join([status, *lines, b"\r\n", response.body]))
        self.transport.close()

    def _expect_head(self) -> None:
        self._start_timer(HEAD_TIMEOUT_S)

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


class _TooLargeError(ValueError):
    """More bytes than a request head may have; out of a parser's callback it comes as the parser's own error."""
