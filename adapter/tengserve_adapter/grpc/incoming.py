"""From the bytes of a ModelInferRequest to the model and what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tengserve_adapter.grpc.codec import Asked, decode_request
from tengserve_adapter.grpc.heads import Head, Parts, parts_of
from tengserve_adapter.grpc.schema import parse, schema
from tengserve_backend.errors import TengserveError
from tengserve_backend.inference import TensorModel

MAX_HEADS: Final = 256
"""So many are remembered."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One ModelInferRequest, as far as it could be understood.

    Attributes:
        size: of the message, in bytes.
        model_name, version, request_id: as the client wrote them, "" where the message was none.
        work: the model and the request; or why there is none.
    """

    size: int
    model_name: str
    version: str
    request_id: str
    work: tuple[TensorModel, Asked] | Exception


class Reader:
    """Reads messages, and remembers the heads of those that were right. Thread-safe.

    Args:
        find: the model of this name and version; raises what the client is to be told.
    """

    def __init__(self, find: Callable[[str, str], TensorModel]) -> None:
        self._find = find
        self._kind = schema().messages["ModelInferRequest"]
        self._heads: dict[bytes, Head] = {}

    def read(self, data: bytes) -> Incoming:
        """The request in a message; raises nothing."""
        parts = parts_of(data)
        head = None if parts is None else self._heads.get(parts.head)
        if parts is None or head is None:
            return self._read_whole(data, parts)
        work: tuple[TensorModel, Asked] | Exception
        try:
            model = self._find(head.model_name, head.version)
            request = head.request(parts.request_id, parts.raw) if head.suits(model) else None
            if request is None:
                return self._read_whole(data, parts)
            work = model, Asked(request, empty_final=False)
        except Exception as error:  # noqa: BLE001 - told to the client as this request's answer; see status_of
            work = error
        return Incoming(len(data), head.model_name, head.version, parts.request_id, work)

    def remembered(self) -> int:
        """How many heads."""
        return len(self._heads)

    def _read_whole(self, data: bytes, parts: Parts | None) -> Incoming:
        try:
            message = parse(self._kind, data)
        except TengserveError as error:
            return Incoming(len(data), "", "", "", error)
        work: tuple[TensorModel, Asked] | Exception
        try:
            model = self._find(message.model_name, message.model_version)
            asked = decode_request(model, message)
            if parts is not None:
                self._keep(parts.head, Head(asked.request, model.outputs))
            work = model, asked
        except Exception as error:  # noqa: BLE001 - told to the client as this request's answer; see status_of
            work = error
        return Incoming(len(data), message.model_name, message.model_version, message.id, work)

    def _keep(self, data: bytes, head: Head) -> None:
        if len(self._heads) >= MAX_HEADS:
            # Whoever sends a new one each time gains nothing by any order in which they go.
            self._heads.clear()
        self._heads[data] = head
