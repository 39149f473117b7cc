"""The models of one repository while the server runs: load, look up, report, unload, drain, stop.

One lock guards the table of models; it is never held while an engine is called. `load_all`, `load`, `unload` and
`stop` block, so they belong in worker threads; everything may be called from any thread at any time.

A version's life; changes to one version happen one after another, those of different versions side by side:

```
LOADING ----------> READY ----------> UNLOADING ----------> UNAVAILABLE ("unloaded")
   |                 | ^ a reload: the old engine answers until the new one is there, then drains
   +--> UNAVAILABLE  +-+
```
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ModelNotFoundError, ModelNotReadyError, ShuttingDownError, TengserveError, shown
from tengserve_backend.repository.served import ServedEngine
from tengserve_backend.repository.source import ModelSource, Progress

_log = logging.getLogger(__name__)

RETIRE_TIMEOUT_S = 60.0
"""How long answers of an engine that is replaced or unloaded may take, when the caller does not say."""

_STOPPED = "The server is stopping."
_UNLOADED = "The model was unloaded."
_FAILED = "The model failed to load; the server's log says why."


class ModelState(enum.Enum):
    """Where a model is in its life; values as Triton's repository index prints them."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
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


@dataclass(slots=True, eq=False)
class _Load:
    """A load that was asked for, for others who want the same to wait for."""

    source: ModelSource
    done: bool = False
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Entry:
    """What the manager knows about one version; written under the manager's lock only.

    Attributes:
        source: what was loaded last, or is to be loaded first.
        engine: what answers.
        failure: why nothing answers, once that is known.
        load: the load that was asked for last and has not ended.
        changing: somebody loads or unloads it, and others wait.
        unloading: the engine it had drains.
    """

    source: ModelSource
    engine: Engine | None = None
    failure: str = ""
    load: _Load | None = None
    changing: bool = False
    unloading: bool = False

    def copy(self) -> _Entry:
        """For whoever reads it outside the lock."""
        return _Entry(self.source, self.engine, self.failure, self.load, self.changing, self.unloading)

    def status(self) -> ModelStatus:
        """Asks the engine, so not under the lock."""
        state, reason = ModelState.LOADING, ""
        if self.unloading:
            state = ModelState.UNLOADING
        elif self.engine is not None:
            engine = self.engine.status()
            state = ModelState.READY if engine.alive else ModelState.UNAVAILABLE
            reason = "" if engine.alive else (engine.failure or "The engine has stopped.")
        elif self.failure and self.load is None:
            state, reason = ModelState.UNAVAILABLE, self.failure
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
        self._make = load
        self._progress = progress
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._started = threading.Event()
        # Engines that nobody finds any more, and that still end what they have.
        self._retiring: list[tuple[str, Engine]] = []
        # By name, the newest version first: the order in which a request without a version tries them.
        self._entries: dict[str, list[_Entry]] = {}
        for source in sources:
            self._add(source)

    def load_all(self) -> None:
        """Load every model that the manager was made with, one after another. Blocks.

        A model that fails is recorded with its reason, and the others still load. Ends early, at the next progress
        report of the running load, when `stop` is called.
        """
        with self._lock:
            entries = self._all()
        for entry in entries:
            with self._lock:
                if self._stopping.is_set():
                    return
                if entry.engine is not None or entry.failure or entry.load is not None:
                    continue  # Somebody's `load` or `unload` was here first.
                load = entry.load = _Load(entry.source)
            self._run(entry, load)
        self._started.set()

    def started(self) -> bool:
        """Whether `load_all` has come to every model. Loads that are asked for later do not change that."""
        return self._started.is_set()

    def load(self, source: ModelSource, *, retire_timeout_s: float = RETIRE_TIMEOUT_S) -> None:
        """Load one version while everything else keeps answering. Blocks.

        A version that is loaded already is loaded anew: then the new engine takes over, and the old one gets time to
        end what it has. So no request fails, and for a while both take memory. When the load fails, the old engine
        stays. Who asks for the same load as somebody else waits for that one.

        Args:
            source: the version; it may be new to the manager.
            retire_timeout_s: how long answers of the engine that it replaces may take; they are aborted then.

        Raises:
            ModelNotReadyError: the load failed; the message is the reason, one sentence that is safe to show.
            ShuttingDownError: the server is stopping.
        """
        with self._lock:
            self._check_running()
            entry = self._entry(source.name, source.version) or self._add(source)
            load = entry.load
            joined = load is not None and load.source == source
            if load is None or not joined:
                load = entry.load = _Load(source)
        if joined:
            with self._lock:
                self._changed.wait_for(lambda: load.done or self._stopping.is_set())
        elif (old := self._run(entry, load)) is not None:
            self._retire(source.name, old, retire_timeout_s)
        if load.failure:
            raise ModelNotReadyError(load.failure)
        self._check_running()

    def unload(self, name: str, version: str | None = None, *, retire_timeout_s: float = RETIRE_TIMEOUT_S) -> None:
        """Unload a version, or all versions of a model: no new request finds it, it ends what it has, and its memory
        is given back. Blocks. Harmless when it is not loaded; a load that runs is waited for.

        Args:
            name, version: of the model.
            retire_timeout_s: how long its answers may take; they are aborted then.

        Raises:
            ModelNotFoundError: there is no such model or version.
            ShuttingDownError: the server is stopping.
        """
        with self._lock:
            entries = self._matching(name, version)
        for entry in entries:
            with self._change(entry):
                with self._lock:
                    old, entry.engine, entry.unloading = entry.engine, None, True
                    if old is not None:
                        self._retiring.append((name, old))
                try:
                    if old is not None:
                        self._retire(name, old, retire_timeout_s)
                finally:
                    with self._lock:
                        entry.unloading, entry.failure = False, _UNLOADED

    def engine(self, name: str, version: str | None = None) -> Engine:
        """The engine of a model, for one request; without a version that of the newest version that is ready.

        Raises:
            ModelNotFoundError: the repository has no such model or version.
            ModelNotReadyError: it loads, unloads, has failed, or the server is stopping; the message says which.
        """
        return ServedEngine(self._serving(name, version), lambda: self._serving(name, version))

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Every version of every model, by name, the newest version first."""
        with self._lock:
            entries = self._all()
        return tuple(map(self._status, entries))

    def default_name(self) -> str | None:
        """The model that a request means which names none: the only one, or None when there are several."""
        with self._lock:
            return next(iter(self._entries)) if len(self._entries) == 1 else None

    async def drain(self, timeout_s: float) -> bool:
        """Let every engine finish what it has and admit nothing more; False when the time ran out first."""
        with self._lock:
            engines = [engine for _, engine in self._engines()]
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in engines)))

    def stop(self) -> None:
        """Stop every engine and make running loads and unloads end soon. Blocks until the engines have stopped.

        Harmless when called again. A load that completes afterwards is undone by the thread that made it.
        """
        with self._lock:
            self._stopping.set()
            engines = self._engines()
            self._retiring.clear()
            for entry in self._all():
                entry.engine = None
                entry.failure = entry.failure or _STOPPED
            self._changed.notify_all()
        for name, engine in engines:
            _stop_engine(name, engine)

    # Under the lock.

    def _all(self) -> list[_Entry]:
        return [entry for name in sorted(self._entries) for entry in self._entries[name]]

    def _engines(self) -> list[tuple[str, Engine]]:
        serving = [(entry.source.name, entry.engine) for entry in self._all() if entry.engine is not None]
        return serving + self._retiring

    def _entry(self, name: str, version: str) -> _Entry | None:
        return next((entry for entry in self._entries.get(name, ()) if entry.source.version == version), None)

    def _add(self, source: ModelSource) -> _Entry:
        entry = _Entry(source)
        versions = self._entries.setdefault(source.name, [])
        versions.append(entry)
        versions.sort(key=lambda entry: int(entry.source.version), reverse=True)
        return entry

    def _matching(self, name: str, version: str | None) -> list[_Entry]:
        entries = self._entries.get(name)
        if entries is None:
            raise ModelNotFoundError(f'There is no model "{shown(name)}".', field="model")
        if version is None:
            return list(entries)
        entry = self._entry(name, version)
        if entry is None:
            raise ModelNotFoundError(f'Model "{shown(name)}" has no version "{shown(version)}".', field="version")
        return [entry]

    # Taking the lock themselves.

    def _serving(self, name: str, version: str | None) -> Engine:
        with self._lock:
            entries = self._matching(name, version)
            for entry in entries:
                if entry.engine is not None:
                    return entry.engine
            newest = entries[0].copy()
        status = newest.status()  # Without an engine, so it asks nobody.
        if status.reason:
            raise ModelNotReadyError(f'Model "{name}" is unavailable: {status.reason}')
        raise ModelNotReadyError(f'Model "{name}" is {status.state.value.lower()}.')

    def _status(self, entry: _Entry) -> ModelStatus:
        while True:
            with self._lock:
                seen = entry.copy()
            status = seen.status()
            # An engine that was replaced or unloaded since, and has stopped, says nothing about the model.
            if status.state is not ModelState.UNAVAILABLE or entry.engine is seen.engine:
                return status

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ShuttingDownError(_STOPPED)

    @contextmanager
    def _change(self, entry: _Entry) -> Iterator[None]:
        """Be the only one who loads or unloads this version."""
        with self._lock:
            self._changed.wait_for(lambda: not entry.changing or self._stopping.is_set())
            self._check_running()
            entry.changing = True
        try:
            yield
        finally:
            with self._lock:
                entry.changing = False
                self._changed.notify_all()

    def _run(self, entry: _Entry, load: _Load) -> Engine | None:
        """Load and take over; the engine that answered until now. The failure, if any, is in `load`."""
        old, failure = None, _FAILED
        try:
            with self._change(entry):
                engine, failure = self._try(load.source)
                if engine is not None:
                    old = self._take_over(entry, load.source, engine)
        except ShuttingDownError:
            failure = _STOPPED  # It waited for its turn.
        finally:
            with self._lock:
                load.done, load.failure = True, failure
                if entry.load is load:
                    entry.load = None
                if entry.engine is None and failure:
                    entry.failure = failure
                self._changed.notify_all()
        return old

    def _take_over(self, entry: _Entry, source: ModelSource, engine: Engine) -> Engine | None:
        """Let a new engine answer; the one that did until now."""
        with self._lock:
            if not self._stopping.is_set():
                old, entry.engine = entry.engine, engine
                entry.source, entry.failure = source, ""
                if old is not None:
                    self._retiring.append((source.name, old))
                return old
        _stop_engine(source.name, engine)
        return None

    def _try(self, source: ModelSource) -> tuple[Engine | None, str]:
        """An engine, or why there is none."""

        def report(stage: str, fraction: float) -> None:
            self._check_running()
            self._progress(source.name, stage, fraction)

        try:
            return self._make(source, report), ""
        except ShuttingDownError:
            return None, _STOPPED
        except TengserveError as error:
            cause = error.__cause__
            _log.error("model %s, version %s: %s", source.name, source.version, error.message, exc_info=cause)
            return None, error.message
        except Exception:  # noqa: BLE001 - loading runs other people's code, which may raise anything
            _log.exception("model %s, version %s failed to load", source.name, source.version)
            return None, _FAILED

    def _retire(self, name: str, engine: Engine, timeout_s: float) -> None:
        """Let an engine of `_retiring` end what it has, and stop it."""
        try:
            if not asyncio.run(engine.drain(timeout_s)):
                _log.warning("model %s: answers that took over %g s more were aborted", name, timeout_s)
        finally:
            _stop_engine(name, engine)
            with self._lock:
                # `stop` may have been here.
                self._retiring = [other for other in self._retiring if other[1] is not engine]


def _stop_engine(name: str, engine: Engine) -> None:
    """Stop one engine; a failure is logged, for the others have to be stopped too."""
    try:
        engine.stop()
    except Exception:  # noqa: BLE001 - whatever a broken device raises, the other engines must stop too
        _log.exception("model %s did not stop cleanly", name)
