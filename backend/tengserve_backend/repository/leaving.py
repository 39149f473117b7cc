"""Models that are on their way out: nobody finds them any more, they end what they have, and are stopped."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from tengserve_backend.repository.entries import Serving
from tengserve_backend.repository.source import ModelSource

_log = logging.getLogger(__name__)


class Leaving:
    """May be called from any thread. Its lock is the last that anybody takes.

    Args:
        released: called when a model that was loaded from a source has stopped, from the thread that stopped it.
    """

    def __init__(self, released: Callable[[ModelSource], None]) -> None:
        self._released = released
        self._lock = threading.Lock()
        self._draining: list[Serving] = []
        self._stopping: list[Serving] = []

    def add(self, old: Serving) -> None:
        """Nobody finds a model any more; `retire` is to come."""
        with self._lock:
            self._draining.append(old)

    def draining(self) -> list[Serving]:
        """Those that still end what they have."""
        with self._lock:
            return list(self._draining)

    def stopping(self) -> tuple[str, ...]:
        """Names of those that were told to stop and have not."""
        with self._lock:
            return tuple(sorted({old.source.name for old in self._stopping}))

    def retire(self, old: Serving, timeout_s: float) -> None:
        """Let a model that was added end what it has, and stop it. Blocks.

        Args:
            old: the model.
            timeout_s: how long its answers may take; they are aborted then.
        """
        try:
            if not asyncio.run(old.model.drain(timeout_s)):
                _log.warning("model %s: answers that took over %g s more were aborted", old.source.name, timeout_s)
        finally:
            self.stop(old)

    def stop(self, old: Serving) -> None:
        """Stop one model; a failure is logged, for the others have to be stopped too. Blocks."""
        with self._lock:
            self._stopping.append(old)
        try:
            old.model.stop()
        except Exception:  # noqa: BLE001 - whatever a broken device raises, the other models must stop too
            _log.exception("model %s did not stop cleanly", old.source.name)
        finally:
            with self._lock:
                self._stopping.remove(old)
                # It may have come here without having been added.
                self._draining = [other for other in self._draining if other is not old]
        self._released(old.source)

    def stop_all(self, models: Sequence[Serving]) -> None:
        """Stop these side by side, so that one that takes its time takes none of the others'. Blocks."""
        threads = [
            threading.Thread(target=self.stop, args=(old,), name=f"stop {old.source.name}", daemon=True)
            for old in models
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def run(call: Callable[[], None], name: str, *, wait: bool) -> None:
    """Run a call here, or in a thread of its own, which ends soon after a stop that aborts what it waits for.

    Args:
        call: retires models.
        name: of the thread.
        wait: run it here.
    """
    if wait:
        call()
    else:
        threading.Thread(target=call, name=name, daemon=True).start()
