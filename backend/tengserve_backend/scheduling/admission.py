"""The door of an engine: how much may be inside at once."""

from __future__ import annotations

import threading

from tengserve_backend.errors import OverloadedError, ShuttingDownError

_RETRY_AFTER_S = 1


class Admission:
    """Counts requests inside the engine and prompt tokens that have not started; refuses what is over a limit.

    Called from the event loop (entering) and from the engine's thread (leaving).

    Args:
        max_requests: running and waiting requests together.
        max_waiting_tokens: prompt tokens of requests that have not started. One request alone is never refused for
            this limit: whether it fits the model at all is another question.
    """

    def __init__(self, *, max_requests: int, max_waiting_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._lock = threading.Lock()
        self._empty = threading.Event()
        self._empty.set()
        self._requests = 0
        self._waiting_tokens = 0
        self._closed = False

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that have not started."""
        return self._waiting_tokens

    @property
    def requests(self) -> int:
        """Requests inside."""
        return self._requests

    def enter(self) -> None:
        """Count a request in; every `enter` needs one `leave`.

        Raises:
            OverloadedError: the queue is full.
            ShuttingDownError: the door is closed.
        """
        with self._lock:
            if self._closed:
                raise ShuttingDownError("The server is shutting down and takes no new requests.")
            if self._requests >= self._max_requests:
                raise OverloadedError(
                    f"The server is overloaded: {self._requests} requests are running or waiting, the limit.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._requests += 1
            self._empty.clear()

    def add_waiting_tokens(self, tokens: int) -> None:
        """Count the prompt of a request that has entered; `start` takes it off.

        Raises:
            OverloadedError: too much is waiting already.
        """
        with self._lock:
            if self._waiting_tokens and self._waiting_tokens + tokens > self._max_waiting_tokens:
                raise OverloadedError(
                    f"The server is overloaded: {self._waiting_tokens} prompt tokens are waiting and this request has "
                    f"{tokens}, over the limit of {self._max_waiting_tokens}.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._waiting_tokens += tokens

    def start(self, tokens: int) -> None:
        """The request's prompt is not waiting any more: it started, or left before it did."""
        with self._lock:
            self._waiting_tokens -= tokens

    def leave(self) -> None:
        """Count a request out."""
        with self._lock:
            self._requests -= 1
            if self._requests == 0:
                self._empty.set()

    def close(self) -> None:
        """Refuse everything from now on."""
        with self._lock:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Block until nobody is inside; False when the time ran out first."""
        return self._empty.wait(timeout_s)
