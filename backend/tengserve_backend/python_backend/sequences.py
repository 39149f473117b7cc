"""Sequences: requests with one correlation id go to one instance, from the request with START to that with END."""

from __future__ import annotations

import collections
import time

from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import InferRequest
from tengserve_backend.python_backend.checks import request_label

MAX_SEQUENCES = 100_000
"""Remembered at the same time; the one that was quiet for longest is forgotten."""


class Sequences:
    """Used on one lock of its owner.

    Args:
        model: its name, for errors.
        instances: how many there are.
        idle_us: a sequence that sends nothing for so long is forgotten.
    """

    def __init__(self, model: str, instances: int, idle_us: int) -> None:
        self._model = model
        self._idle_ns = idle_us * 1000
        self._open: collections.OrderedDict[int | str, tuple[int, int]] = collections.OrderedDict()
        self._load = [0] * instances

    def instance(self, request: InferRequest) -> int:
        """The instance that a request must go to.

        Raises:
            InvalidRequestError: it names no sequence, or one that was not started.
        """
        flags, now = request.sequence, time.monotonic_ns()
        key = flags.correlation_id
        label = request_label(request.request_id)
        if not key:
            raise InvalidRequestError(
                f"{label}inference request to model '{self._model}' must specify a non-zero or non-empty "
                f"correlation ID",
                field="sequence_id",
            )
        self._forget(now)
        if flags.start:
            self._close(key)
            at = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[at] += 1
        elif key in self._open:
            at = self._open[key][0]
        else:
            raise InvalidRequestError(
                f"{label}inference request for sequence {str(key)[:64]} to model '{self._model}' must specify the "
                f"START flag on the first request of the sequence",
                field="sequence_start",
            )
        self._open[key] = (at, now)
        self._open.move_to_end(key)
        if flags.end:
            self._close(key)
        return at

    def _close(self, key: int | str) -> None:
        if key in self._open:
            self._load[self._open.pop(key)[0]] -= 1

    def _forget(self, now: int) -> None:
        while self._open:
            key, (_, last) = next(iter(self._open.items()))
            if now - last <= self._idle_ns and len(self._open) < MAX_SEQUENCES:
                return
            self._close(key)
