"""The models of one repository while the server runs: load, look up, report, drain, stop.

One lock guards the table of models; it is never held while an engine is called. `load_all` runs in a thread of its
owner, everything else may be called from any thread at any time.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ModelNotFoundError, ModelNotReadyError, ShuttingDownError, TengserveError, shown
from tengserve_backend.repository.source import ModelSource, Progress

_log = logging.getLogger(__name__)

_STOPPED = "The server is stopping."


class ModelState(enum.Enum):
    """Where a model is in its life; values as Triton's repository index prints them."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One version of one model, now.

    Attributes:
        name, version: as in the model repository.
        state: READY only while its engine is alive.
        reason: "" unless UNAVAILABLE; one sentence that is safe to show to a client.
    """

    name: str
    version: str
    state: ModelState
    reason: str


@dataclass(slots=True)
class _Entry:
    """What the manager knows about one source; written under the manager's lock only."""

    source: ModelSource
    engine: Engine | None = None
    failure: str = ""

    def status(self) -> ModelStatus:
        state, reason = ModelState.LOADING, ""
        if self.failure:
            state, reason = ModelState.UNAVAILABLE, self.failure
        elif self.engine is not None:
            engine = self.engine.status()
            state = ModelState.READY if engine.alive else ModelState.UNAVAILABLE
            reason = "" if engine.alive else (engine.failure or "The engine has stopped.")
        return ModelStatus(self.source.name, self.source.version, state, reason)


def _ignore(model: str, stage: str, fraction: float) -> None:
    """The progress callback of a manager that nobody watches."""


class ModelManager:
    """Owns the engines of the models that it was given."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        load: Callable[[ModelSource, Progress], Engine],
        progress: Callable[[str, str, float], None] = _ignore,
    ) -> None:
        """Nothing is loaded yet: every model is LOADING until `load_all` has come to it.

        Args:
            sources: the models; name and version together are unique.
            load: makes an engine; blocks, and reports through the Progress that it gets.
            progress: called with the model's name, the stage and its fraction, from the thread that loads.
        """
        self._load = load
        self._progress = progress
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        # By name, the newest version first: the order in which a request without a version tries them.
        self._entries: dict[str, list[_Entry]] = {}
        for source in sorted(sources, key=lambda source: int(source.version), reverse=True):
            self._entries.setdefault(source.name, []).append(_Entry(source))

    def load_all(self) -> None:
        """Load every model, one after another. Blocks.

        A model that fails is recorded with its reason, and the others still load. Ends early, at the next progress
        report of the running load, when `stop` is called.
        """
        for entry in self._all():
            if self._stopping.is_set():
                return
            self._load_one(entry)

    def engine(self, name: str, version: str | None = None) -> Engine:
        """The engine of a model; without a version that of the newest version that is ready.

        Raises:
            ModelNotFoundError: the repository has no such model or version.
            ModelNotReadyError: it loads, has failed, or the server is stopping; the message says which.
        """
        with self._lock:
            entries = self._entries.get(name)
            if entries is None:
                raise ModelNotFoundError(f'There is no model "{shown(name)}".', field="model")
            if version is not None:
                entries = [entry for entry in entries if entry.source.version == version]
                if not entries:
                    raise ModelNotFoundError(
                        f'Model "{shown(name)}" has no version "{shown(version)}".', field="version"
                    )
            for entry in entries:
                if entry.engine is not None:
                    return entry.engine
            failure = entries[0].failure
        raise ModelNotReadyError(
            f'Model "{name}" is unavailable: {failure}' if failure else f'Model "{name}" is loading.'
        )

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Every version of every model, by name, the newest version first."""
        return tuple(entry.status() for entry in self._snapshot())

    def default_name(self) -> str | None:
        """The model that a request means which names none: the only one, or None when there are several."""
        return next(iter(self._entries)) if len(self._entries) == 1 else None

    async def drain(self, timeout_s: float) -> bool:
        """Let every engine finish what it has and admit nothing more; False when the time ran out first."""
        engines = [entry.engine for entry in self._snapshot() if entry.engine is not None]
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in engines)))

    def stop(self) -> None:
        """Stop every engine and make a running `load_all` end soon. Blocks until the engines have stopped.

        Harmless when called again. A load that completes afterwards is undone by the thread that made it.
        """
        self._stopping.set()
        with self._lock:
            engines = []
            for entry in self._all():
                if entry.engine is not None:
                    engines.append((entry.source.name, entry.engine))
                    entry.engine = None
                entry.failure = entry.failure or _STOPPED
        for name, engine in engines:
            _stop_engine(name, engine)

    def _all(self) -> list[_Entry]:
        return [entry for name in sorted(self._entries) for entry in self._entries[name]]

    def _snapshot(self) -> list[_Entry]:
        with self._lock:
            return [_Entry(entry.source, entry.engine, entry.failure) for entry in self._all()]

    def _load_one(self, entry: _Entry) -> None:
        name = entry.source.name

        def report(stage: str, fraction: float) -> None:
            if self._stopping.is_set():
                raise ShuttingDownError(_STOPPED)
            self._progress(name, stage, fraction)

        try:
            engine = self._load(entry.source, report)
        except ShuttingDownError:
            self._fail(entry, _STOPPED)
            return
        except TengserveError as error:
            _log.error("model %s, version %s: %s", name, entry.source.version, error.message, exc_info=error.__cause__)
            self._fail(entry, error.message)
            return
        except Exception:  # noqa: BLE001 - loading runs other people's code, which may raise anything
            _log.exception("model %s, version %s failed to load", name, entry.source.version)
            self._fail(entry, "The model failed to load; the server's log says why.")
            return
        with self._lock:
            if not self._stopping.is_set():
                entry.engine = engine
                return
        _stop_engine(name, engine)

    def _fail(self, entry: _Entry, reason: str) -> None:
        with self._lock:
            entry.failure = reason


def _stop_engine(name: str, engine: Engine) -> None:
    """Stop one engine; a failure is logged, for the others have to be stopped too."""
    try:
        engine.stop()
    except Exception:  # noqa: BLE001 - whatever a broken device raises, the other engines must stop too
        _log.exception("model %s did not stop cleanly", name)
