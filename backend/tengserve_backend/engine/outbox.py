"""From the engine's thread to the event loops: a whole step's outputs in one hop a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tengserve_backend.engine.handle import GenerationHandle
from tengserve_backend.errors import TengserveError
from tengserve_backend.generation import TokenEvent

_Output = tuple[GenerationHandle, TokenEvent | TengserveError]


class Outbox:
    """Collects the outputs of a step and sends them together. Used by the engine's thread only."""

    def __init__(self) -> None:
        self._outputs: dict[asyncio.AbstractEventLoop, list[_Output]] = {}

    def put(self, handle: GenerationHandle, output: TokenEvent | TengserveError) -> None:
        """Queue an event, or the error that ends the request."""
        self._outputs.setdefault(handle.loop, []).append((handle, output))

    def send(self) -> None:
        """Send everything queued."""
        outputs, self._outputs = self._outputs, {}
        for loop, batch in outputs.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                # The owner's loop is closed, so nobody is left who could read.
                continue


def _deliver(batch: Sequence[_Output]) -> None:
    for handle, output in batch:
        if isinstance(output, TokenEvent):
            handle.deliver(output)
        else:
            handle.fail(output)
