"""The listening socket."""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

from tengserve_backend.errors import TengserveError

_log = logging.getLogger(__name__)

BACKLOG = 1024
_OTHER_FILES = 512
"""Open files that are no client connections: the models', the event loop's, those of libraries."""


class ListenError(TengserveError):
    """The address cannot be listened on; the message says why."""


def listen(host: str, port: int, purpose: str) -> socket.socket:
    """A socket that listens on exactly this address.

    It listens before the server runs, so that a second server on the same port fails at once, and so that early clients
    wait a moment instead of being refused.

    Args:
        host, port: of it.
        purpose: what is to listen there, and which flag names the port.

    Raises:
        ListenError: the host is unknown, or the port, as the message says with its purpose, is taken or not allowed.
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
    raise ListenError(f"cannot listen on {host} port {port}: {reason} ({purpose})") from failure


def check_free(host: str, port: int, purpose: str) -> None:
    """Tell early that a port cannot be listened on, for a server that opens its own socket later.

    Raises:
        ListenError: as `listen`.
    """
    listen(host, port, purpose).close()


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


def make_room_for(connections: int) -> None:
    """Raise the process's limit of open files, as far as the system lets it: a connection is one."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning(
            "the system allows %d open files (ulimit -n), %d connections may need %d", hard, connections, wanted
        )


def url_of(listener: socket.socket) -> str:
    """The URL under which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
