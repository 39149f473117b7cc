"""Content encodings of v2 infer, both ways: gzip, and deflate, which is zlib's container and not the bare stream."""

from __future__ import annotations

import enum
import zlib
from typing import Final

from tengserve_backend.errors import InvalidRequestError, RequestTooLargeError

MAX_HEADER_CHARS: Final = 1024


class Encoding(enum.Enum):
    """By its name in headers; the value is zlib's window, which says what container there is."""

    gzip = 31
    deflate = 15


def encoding_of(header: str) -> Encoding | None:
    """The encoding that Content-Encoding names; None is identity.

    Raises:
        KeyError: another one.
    """
    name = header.strip().lower()
    return None if name in ("", "identity") else Encoding[name]


def decompress(encoding: Encoding, raw: bytes, max_bytes: int) -> bytes:
    """The content.

    Raises:
        InvalidRequestError: it is damaged.
        RequestTooLargeError: there is more than max_bytes of it; no more than that was made.
    """
    machine = zlib.decompressobj(encoding.value)
    try:
        content = machine.decompress(raw, max_bytes + 1)
    except zlib.error:
        raise InvalidRequestError(f"failed to decompress the body: it is no {encoding.name} data") from None
    if len(content) > max_bytes:
        raise RequestTooLargeError(f"Request body too large. At most {max_bytes} bytes are allowed.")
    if not machine.eof or machine.unused_data:
        raise InvalidRequestError(f"failed to decompress the body: its {encoding.name} data does not end where it does")
    return content


def compress(encoding: Encoding, content: bytes) -> bytes:
    """The content, encoded; at the speed that suits a server."""
    machine = zlib.compressobj(1, zlib.DEFLATED, encoding.value)
    return machine.compress(content) + machine.flush()


def accepted(header: str) -> Encoding | None:
    """The encoding that Accept-Encoding likes best; None is identity, which wins over whatever it likes less."""
    if not header:
        return None
    qualities: dict[str, float] = {}
    for item in header[:MAX_HEADER_CHARS].split(","):
        name, _, parameters = item.partition(";")
        qualities[name.strip().lower()] = _quality(parameters)
    identity = qualities.get("identity", 0.0)
    best = max(Encoding, key=lambda encoding: qualities.get(encoding.name, 0.0))
    quality = qualities.get(best.name, 0.0)
    return best if quality > 0 and quality >= identity else None


def _quality(parameters: str) -> float:
    key, _, value = parameters.partition("=")
    if key.strip().lower() != "q":
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
