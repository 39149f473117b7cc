"""Sends responses to one request: the only way in decoupled mode, and a way in the default mode too."""

from __future__ import annotations

import threading

from tengserve_backend.python_backend.api.errors import TritonModelException
from tengserve_backend.python_backend.api.messages import InferenceResponse
from tengserve_backend.python_backend.ticket import Ticket

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""


class InferenceResponseSender:
    """May be used from any thread, also after `execute` has returned.

    A sender that is forgotten before it sent its final response ends the request all the same.

    Args:
        ticket: the request.
        decoupled: whether it may have any number of responses.
        model, version: that answer.
    """

    def __init__(self, ticket: Ticket, *, decoupled: bool, model: str, version: str) -> None:
        self._ticket = ticket
        self._decoupled = decoupled
        self._model = model
        self._version = version
        self._lock = threading.Lock()
        self._closed = False
        self._sent = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        Args:
            response: may be left out when the flag says that there is nothing more.
            flags: TRITONSERVER_RESPONSE_COMPLETE_FINAL with the last one, else 0.

        Raises:
            TritonModelException: a rule of the API is broken; the text says which.
        """
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, not {type(response).__name__}")
        with self._lock:
            if not self._decoupled:
                if response is not None and self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = flags == FINAL
            self._sent = self._sent or response is not None
        # A request of the default mode has its whole answer with its one response.
        final = flags == FINAL or not self._decoupled
        if response is not None:
            response.answer(self._ticket, self._model, self._version, final=final)
        elif not self._ticket.ended:
            InferenceResponse().answer(self._ticket, self._model, self._version, final=True)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for responses any more."""
        return self._ticket.cancelled

    def closed(self) -> bool:
        """Whether it may send no more; not part of the API."""
        with self._lock:
            return self._closed

    def close(self) -> bool:
        """Refuse further responses; not part of the API.

        Returns:
            Whether it did not before. That the request has ended meanwhile is not the sender's fault.
        """
        with self._lock:
            was_open = not self._closed
            self._closed = True
            return was_open

    def __del__(self) -> None:
        # Runs on any thread, wherever the collector happens to be; so it takes no lock, and leaves the rest to the
        # caller's event loop.
        ticket = getattr(self, "_ticket", None)
        if ticket is not None and not ticket.ended:
            ticket.abandon(decoupled=self._decoupled, model=self._model, version=self._version)
