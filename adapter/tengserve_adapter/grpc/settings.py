"""What the gRPC server is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tengserve_adapter.tensors.forwarded_headers import ForwardedHeaders


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the server.

    Attributes:
        certificate: its certificate, with the chain up to the issuer.
        key: its private key, not encrypted.
    """

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """The operator's.

    Attributes:
        host: address to listen on, and no other; 0.0.0.0 and :: mean every address of the machine.
        port: 0 takes any free one.
        max_message_bytes: largest request; what is larger is refused with RESOURCE_EXHAUSTED.
        max_held_bytes: of requests that are read and not answered; a request that would go beyond is UNAVAILABLE.
        tls: without it connections are not encrypted.
        strict_decoupled: refuse ModelInfer for decoupled models, as Triton does.
        forwarded_headers: metadata of a call that is parameters for a python model.
        server_name, server_version: in ServerMetadata.
        max_connections: of clients at once; what is beyond is closed.
        max_unary, max_streams: ModelInfer calls and streams open at once.
        max_stream_requests: requests of one stream that are not answered; the stream is not read meanwhile.
    """

    host: str = "127.0.0.1"
    port: int = 8081
    max_message_bytes: int = 64 * 1024 * 1024
    max_held_bytes: int = 256 * 1024 * 1024
    tls: TlsFiles | None = None
    strict_decoupled: bool = False
    forwarded_headers: ForwardedHeaders | None = None
    server_name: str = "tengserve"
    server_version: str = ""
    max_connections: int = 4096
    max_unary: int = 4096
    max_streams: int = 1024
    max_stream_requests: int = 256
