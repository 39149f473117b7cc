"""Writing answers to the socket: one JSON body, or server-sent events."""

from __future__ import annotations

from typing import Final

from starlette.types import Send

_EVENT_HEADERS: Final = [
    # An event is worth nothing late: no cache and no proxy may hold it back.
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """A stream of events over one ASGI response. Status and headers go out with the first event, not before."""

    def __init__(self, send: Send, *, status: int = 200, content_type: str = "text/event-stream") -> None:
        self._send = send
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

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_json(send: Send, body: bytes) -> None:
    """Answer 200 with a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
