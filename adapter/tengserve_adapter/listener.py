"""The listening socket and the bounds of a connection: what uvicorn leaves open."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tengserve_backend.errors import ServerError

BACKLOG = 1024
MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


class ListenError(ServerError):
    """The address cannot be listened on; the message says why."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on exactly this address.

    It listens before the server runs, so that a second server on the same port fails at once, and so that early clients
    wait a moment instead of being refused.

    Raises:
        ListenError: the host is unknown, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ListenError(f"cannot listen on {host}: {reason}") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            return _listen(family, kind, protocol, address)
        except OSError as error:
            failure = failure or error
    reason = failure.strerror if failure else "no address found"
    raise ListenError(f"cannot listen on {host} port {port}: {reason}") from failure


def _listen(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted server must not wait for the old one's closed connections to expire.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL under which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request head is bounded in size and in time.

    uvicorn bounds neither with httptools: one client could fill the memory with headers, or hold connections for ever
    by sending none. A head that is too large is answered with 400, a head that takes too long closes the connection.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and now owes a request head."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and so is the wait for its head."""
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request starts; keep-alive ended the wait for its first byte."""
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._head_arrived()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            # httptools turns it into a parser error, which uvicorn answers with 400.
            raise ValueError("request head too large")

    def _expect_head(self) -> None:
        self._head_arrived()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
