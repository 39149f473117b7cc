"""Writing answers to the socket: one JSON body, or server-sent events."""

from __future__ import annotations

from typing import Final, Protocol

from starlette.types import Scope, Send

_EVENT_HEADERS: Final = [
    # An event is worth nothing late: no cache and no proxy may hold it back.
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


DIRECT_WRITER: Final = "tengserve.direct_writer"
"""Where the connection leaves its DirectWriter among a scope's extensions."""


class DirectWriter(Protocol):
    """Writes pieces of a response's body, once it has begun, past everything that only looks at how it begins."""

    @property
    def ready(self) -> bool:
        """Whether a piece can be written now without waiting for the client."""
        ...

    def write(self, piece: bytes) -> None:
        """Write a piece; only while `ready`."""
        ...


def direct_writer(scope: Scope) -> DirectWriter | None:
    """The connection's, if it has one."""
    writer: DirectWriter | None = scope.get("extensions", {}).get(DIRECT_WRITER)
    return writer


class EventStream:
    """A stream of events over one ASGI response. Status and headers go out with the first event, not before."""

    def __init__(
        self,
        send: Send,
        *,
        status: int = 200,
        content_type: str = "text/event-stream",
        writer: DirectWriter | None = None,
    ) -> None:
        self._send = send
        self._writer = writer
        self._status = status
        self._content_type = content_type
        self.started = False

    async def start(self) -> None:
        """Send status and headers, if they have not gone out yet."""
        if not self.started:
            headers = [(b"content-type", self._content_type.encode("ascii")), *_EVENT_HEADERS]
            await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
            self.started = True

    async def event(self, data: bytes) -> None:
        """Send one event, `data: {json}` and a blank line; `data` is JSON without line breaks."""
        await self.start()
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": True})

    @property
    def ready(self) -> bool:
        """Whether an event can be sent at once."""
        return self.started and self._writer is not None and self._writer.ready

    def event_now(self, data: bytes) -> None:
        """As `event`; only while `ready`."""
        assert self._writer is not None  # noqa: S101 - for the type checker: it is ready
        self._writer.write(b"data: %b\n\n" % data)

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_json(send: Send, body: bytes) -> None:
    """Answer 200 with a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
