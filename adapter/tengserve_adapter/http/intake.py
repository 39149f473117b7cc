"""Taking in request bodies, for every route of the app: bounded in bytes, in time, and in bytes held at once.

Nothing is read before the app asks for it, so a reply that needs no body comes at once. When it asks, it gets the whole
body in one message. The body is held until the app releases it, asks for what comes next, or has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tengserve_adapter.http.body_rules import body_rules, set_release
from tengserve_adapter.http.disconnect import ClientDisconnected
from tengserve_adapter.http.errors import BodyTimeoutError, response_for
from tengserve_adapter.http.settings import HttpSettings
from tengserve_backend.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
    ShuttingDownError,
    TengserveError,
)

MIN_BYTES_PER_S: Final = 4096
RATE_WINDOW_S: Final = 15.0
"""A body has to bring at least the product of the two in each such time, or be complete: a client that sends most of
a large body and then waits must not hold that memory until the body's timeout."""

_LOOK_S: Final = 0.25
"""How often a wait for the client is interrupted by a look at the clock and at whether the server drains."""

_RETRY_AFTER_S: Final = 5


class BodyIntake:
    """ASGI middleware around the whole app: the one place where bodies are read."""

    def __init__(self, app: ASGIApp, *, settings: HttpSettings, draining: Callable[[], bool]) -> None:
        self._app = app
        self.settings = settings
        self.draining = draining
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; what is wrong with its body is answered here, whatever the app makes of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            if exchange.failure is None:
                raise
        finally:
            exchange.release()
        if exchange.failure is not None and not exchange.started:
            rules = body_rules(scope)
            respond = response_for if rules is None else rules.respond
            await respond(exchange.failure)(scope, receive, send)

    def hold(self, size: int) -> None:
        """Count bytes of a body that arrived.

        Raises:
            OverloadedError: too many are held already.
        """
        if self._held_bytes + size > self.settings.max_held_body_bytes:
            raise OverloadedError("Too many request bodies are arriving at once.", retry_after_s=_RETRY_AFTER_S)
        self._held_bytes += size

    def release(self, size: int) -> None:
        """Count them out."""
        self._held_bytes -= size


class _Exchange:
    """One request and its answer, as the app sees them."""

    def __init__(self, intake: BodyIntake, scope: Scope, receive: Receive, send: Send) -> None:
        self._intake = intake
        self._scope = scope
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._send = send
        self._asked = False
        self._held_bytes = 0
        self._silenced = False
        self.failure: TengserveError | None = None
        self.started = False

    async def receive(self) -> Message:
        """The app's `receive`: the whole body, and after it what the server has to say.

        Raises:
            RequestTooLargeError: more than max_body_bytes or the route allow, declared or sent; no more is read.
            BodyTimeoutError: it took longer than body_timeout_s, or arrived too slowly.
            OverloadedError: the server holds too many bytes of bodies.
            ShuttingDownError: the server drains, and the body was not complete.
            InvalidRequestError: it is compressed.
        """
        if self.failure is not None:
            return {"type": "http.disconnect"}
        if self._asked:
            self.release()
            return await self._receive()
        self._asked = True
        set_release(self._scope, self.release)
        try:
            return {"type": "http.request", "body": await self._whole_body(), "more_body": False}
        except ClientDisconnected:
            return {"type": "http.disconnect"}
        except TengserveError as error:
            self.failure = error
            raise

    async def send(self, message: Message) -> None:
        """The app's `send`. After a failed read the app's answer gives way; a second answer is no answer."""
        if message["type"] == "http.response.start":
            if self.failure is not None or self.started:
                self._silenced = True
            else:
                self.started = True
        if not self._silenced:
            await self._send(message)

    def release(self) -> None:
        """The body is not needed any more."""
        self._intake.release(self._held_bytes)
        self._held_bytes = 0

    async def _whole_body(self) -> bytes:
        self._check_headers()
        chunks: list[bytes] = []
        pace = _Pace(self._intake.settings.body_timeout_s)
        while True:
            message = await self._next(pace)
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk: bytes = message.get("body", b"")
            if self._held_bytes + len(chunk) > self._max_bytes():
                raise self._too_large()
            if chunk:
                self._intake.hold(len(chunk))
                self._held_bytes += len(chunk)
                chunks.append(chunk)
                pace.moved(len(chunk))
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _check_headers(self) -> None:
        rules = body_rules(self._scope)
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity") and (rules is None or not rules.encoded):
            raise InvalidRequestError("The body must be sent uncompressed, got another Content-Encoding than identity.")
        declared = self._headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 19 or int(declared) > self._max_bytes()):
            raise self._too_large()

    async def _next(self, pace: _Pace) -> Message:
        while True:
            try:
                # No task of its own: nearly always the message is there. The server loses none when it is interrupted.
                async with asyncio.timeout(min(_LOOK_S, pace.left_s())):
                    return await self._receive()
            except TimeoutError:
                if self._intake.draining():
                    raise ShuttingDownError("The service is stopping, and the request was not complete.") from None
                pace.check()

    def _max_bytes(self) -> int:
        rules = body_rules(self._scope)
        return self._intake.settings.max_body_bytes if rules is None else rules.max_bytes

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"Request body too large. At most {self._max_bytes()} bytes are allowed.")


class _Pace:
    """How fast a body arrives."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._end = self._loop.time() + timeout_s
        self._window_end = self._loop.time() + RATE_WINDOW_S
        self._window_bytes = 0

    def left_s(self) -> float:
        """Until there is something to check."""
        return max(0.0, min(self._end, self._window_end) - self._loop.time())

    def moved(self, size: int) -> None:
        """Bytes have arrived."""
        self._window_bytes += size
        self.check()

    def check(self) -> None:
        """Raise BodyTimeoutError when the body is late."""
        now = self._loop.time()
        if now >= self._end:
            raise BodyTimeoutError(f"The body must arrive within {self._timeout_s:g} seconds.")
        if now >= self._window_end:
            if self._window_bytes < MIN_BYTES_PER_S * RATE_WINDOW_S:
                raise BodyTimeoutError(f"The body must arrive at {MIN_BYTES_PER_S} bytes a second or faster.")
            self._window_end = now + RATE_WINDOW_S
            self._window_bytes = 0
