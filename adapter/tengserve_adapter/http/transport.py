"""The way to a client: writing to one that has gone does nothing, and closing comes to an end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

CLOSE_TIMEOUT_S = 30.0
"""How long a client may take to read what is left for it when its connection closes."""

GATHERED_BYTES = 64 * 1024
"""What is written in one turn of the event loop is sent at once, up to so much: a head and its small body reach the
client together, and wake it once."""

DISCARD_TIMEOUT_S = 3.0
"""How long the rest of a request that is answered already may still arrive, unread. Closing at once would make the
client's system throw the answer away (a TCP reset), before the client has seen why."""


class ClientTransport(asyncio.Transport):
    """An asyncio transport with an end to its patience.

    uvicorn's `close` waits for the client to read everything, without a limit, and closes while the client still sends;
    a write to a connection that is lost is an exception in uvloop, which would end up in the log as ours.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, client_sends: Callable[[], bool]
    ) -> None:
        """Wrap the event loop's transport.

        Args:
            transport: the event loop's.
            loop: the event loop.
            client_sends: whether the client is in the middle of sending something.
        """
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._client_sends = client_sends
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._gathered: list[bytes | bytearray | memoryview] = []
        self._gathered_bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, if there still is a client."""
        if self.is_closing():
            return
        if not self._gathered:
            self._loop.call_soon(self._send)
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes > GATHERED_BYTES:
            self._send()

    def write_now(self, data: bytes) -> None:
        """As `write`, in one piece with what is gathered already, or else at once."""
        if self._gathered:
            self.write(data)
        elif not self.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Leave what the client sends to the system's buffers."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close when the client has read what was written and, if it is sending, has seen the answer; or in time."""
        if self.is_closing():
            return
        self._send()
        self._closing = True
        if self._client_sends():
            # The client is told that this was all, and may send on until it notices.
            self.resume_reading()
            # It may be gone already.
            with contextlib.suppress(OSError):
                self._transport.write_eof()
            self._timer = self._loop.call_later(DISCARD_TIMEOUT_S, self._stop_reading)
        else:
            self._stop_reading()

    def client_left(self) -> None:
        """The client has ended its sending side."""
        self._send()
        self._closing = True
        self._stop_reading()

    def abort(self) -> None:
        """Close now."""
        self._closing = True
        self._transport.abort()

    def connection_lost(self) -> None:
        """The connection is closed."""
        self._closing = True
        self._stop_timer()

    def _send(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if gathered and not self._transport.is_closing():
            self._transport.writelines(gathered)

    def _stop_reading(self) -> None:
        self._stop_timer()
        self._transport.close()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
