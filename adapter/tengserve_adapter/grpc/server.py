"""The gRPC server: what it listens on, its limits, its start and its end."""

from __future__ import annotations

import ipaddress
import ssl
from typing import Final

import grpc

from tengserve_adapter.grpc.calls import Subscriptions
from tengserve_adapter.grpc.health import HealthService, ReflectionService
from tengserve_adapter.grpc.schema import HEALTH, INFERENCE, REFLECTIONS
from tengserve_adapter.grpc.service import InferenceService, Served
from tengserve_adapter.grpc.settings import GrpcSettings, TlsFiles
from tengserve_adapter.grpc.stream import METHOD, StreamService
from tengserve_adapter.listener import ListenError
from tengserve_backend.errors import ConfigurationError

_MAX_STREAMS_A_CONNECTION: Final = 4096
_MAX_SUBSCRIPTIONS: Final = 1024
_HANDSHAKE_TIMEOUT_MS: Final = 20_000
"""A connection that says nothing counts too, so it is not kept for grpc's two minutes."""
_KEEPALIVE_MS: Final = 60_000
_KEEPALIVE_TIMEOUT_MS: Final = 20_000
_MIN_PING_INTERVAL_MS: Final = 10_000
"""Clients that ping more often without sending anything are told to stop: Triton's own bound, five minutes, ends
connections of clients that keep them alive through a load balancer."""


class GrpcServer:
    """Made, started and closed in one event loop."""

    def __init__(self, served: Served, settings: GrpcSettings) -> None:
        """Nothing listens yet.

        Args:
            served: what the RPCs are about.
            settings: the operator's.
        """
        self._settings = settings
        inference = InferenceService(served, settings)
        self._streams = StreamService(inference, settings)
        self._subscriptions = Subscriptions(_MAX_SUBSCRIPTIONS)
        self._server = grpc.aio.server(options=_options(settings))
        handlers = {INFERENCE: {**inference.handlers(), METHOD: self._streams.handler()}}
        handlers[HEALTH] = HealthService(served.check_ready, self._subscriptions).handlers()
        handlers |= {name: ReflectionService(name, self._subscriptions).handlers() for name in REFLECTIONS}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()]
        )

    async def start(self) -> str:
        """Listen; the address under which a client on this machine reaches the server, such as 127.0.0.1:8081.

        Raises:
            ListenError: the address cannot be listened on.
            ConfigurationError: the TLS files are not right.
        """
        settings = self._settings
        credentials = None if settings.tls is None else _credentials(settings.tls)
        address = _address(settings.host, settings.port)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ListenError(f"cannot listen for gRPC on {settings.host} port {settings.port}")
        await self._server.start()
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - read
        return _address(reachable, port)

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, give what is open this long to end, then end it. Harmless when nothing was started."""
        self._streams.close()
        self._subscriptions.close()
        await self._server.stop(grace_s)


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    return [
        # A second server on the same port must fail, not share its clients.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MAX_STREAMS_A_CONNECTION),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        # A client that vanished without a word is found out, and its requests are cancelled.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    try:
        # grpc tells nothing of what is wrong with them.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password="")
        certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "they do not belong together"
        raise ConfigurationError(f"the TLS certificate and key of gRPC cannot be used: {reason}") from None
    return grpc.ssl_server_credentials([(key, certificate)])


def _address(host: str, port: int) -> str:
    try:
        is_v6 = ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        is_v6 = False
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"
