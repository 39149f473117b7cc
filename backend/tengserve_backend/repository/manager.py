"""The models of one repository while the server runs: load, look up, report, unload, drain, stop.

A model is an engine, or takes tensors. One lock guards the table of models; it is never held while a model is called.
`load_all`, `load`, `unload` and `stop` block, so they belong in worker threads; everything may be called from any
thread at any time.

A version's life; changes to one version happen one after another, those of different versions side by side:

```
LOADING ----------> READY ----------> UNLOADING ----------> UNAVAILABLE ("unloaded")
   |                 | ^ a reload: the old model answers until the new one is there, then drains
   +--> UNAVAILABLE  +-+
```
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    ShuttingDownError,
)
from tengserve_backend.inference.llm import LlmTensorModel
from tengserve_backend.inference.model import Configured, TensorModel
from tengserve_backend.repository.attempt import FAILED, STOPPED, Attempts, nobody_watches
from tengserve_backend.repository.entries import (
    UNLOADED,
    Entry,
    Load,
    ModelState,
    ModelStatus,
    Serving,
    Table,
    is_engine,
    takes_tensors,
    unanswered,
)
from tengserve_backend.repository.leaving import Leaving, run
from tengserve_backend.repository.served import ServedEngine, ServedTensorModel
from tengserve_backend.repository.source import ModelSource, Progress

__all__ = ["ModelManager", "ModelState", "ModelStatus"]

RETIRE_TIMEOUT_S = 60.0
"""How long answers of a model that is replaced or unloaded may take, when the caller does not say."""


def _forget(source: ModelSource) -> None:
    """The release callback of a manager whose sources need no care."""


class ModelManager:
    """Owns the models that it was given or told to load."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        load: Callable[[ModelSource, Progress], Engine | TensorModel],
        progress: Callable[[str, str, float], None] = nobody_watches,
        *,
        as_tensors: Callable[[Engine], TensorModel] = LlmTensorModel,
        released: Callable[[ModelSource], None] = _forget,
    ) -> None:
        """Nothing is loaded yet: every model is LOADING until `load_all` has come to it.

        Args:
            sources: the models; name and version together are unique.
            load: makes a model; blocks, and reports through the Progress that it gets.
            progress: called with the model's name, the stage and its fraction, from the thread that loads.
            as_tensors: shows an engine as a model of tensors.
            released: called when a model that was loaded from a source has stopped, from the thread that stopped it.
        """
        self._as_tensors = as_tensors
        self._attempts = Attempts(load, progress)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._start_failures: list[ModelStatus] = []
        self._leaving = Leaving(released)
        self._table = Table()
        for source in sources:
            self._table.add(source)

    def load_all(self) -> None:
        """Load every model that the manager was made with, one after another. Blocks.

        A model that fails is recorded with its reason, and the others still load. Ends early, at the next progress
        report of the running load, when `stop` is called.
        """
        with self._lock:
            entries = self._table.all()
        for entry in entries:
            with self._lock:
                if self._stopping.is_set():
                    return
                if entry.serving is not None or entry.failure or entry.load is not None:
                    continue  # Somebody's `load` or `unload` was here first.
                load = entry.load = Load(entry.source)
            self._run(entry, load)
            if load.failure:
                failed = ModelStatus(load.source.name, load.source.version, ModelState.UNAVAILABLE, load.failure)
                with self._lock:
                    self._start_failures.append(failed)
        self._started.set()

    def started(self) -> bool:
        """Whether `load_all` has come to every model. Loads that are asked for later do not change that."""
        return self._started.is_set()

    def start_failures(self) -> tuple[ModelStatus, ...]:
        """What `load_all` has failed to load so far, whatever became of it since."""
        with self._lock:
            return tuple(self._start_failures)

    def device_lost(self) -> str:
        """One sentence once a device failed while a model loaded, else "": the process has to end.

        An engine whose device failed says so itself, see EngineStatus.
        """
        return self._attempts.device_lost

    def load(
        self, source: ModelSource, *, retire_timeout_s: float = RETIRE_TIMEOUT_S, wait_for_old: bool = True
    ) -> None:
        """Load one version while everything else keeps answering. Blocks.

        A version that is loaded already is loaded anew: then the new model takes over, and the old one gets time to
        end what it has. So no request fails, and for a while both take memory. When the load fails, the old model
        stays. Who asks for the same load as somebody else waits for that one.

        Args:
            source: the version; it may be new to the manager.
            retire_timeout_s: how long answers of the model that it replaces may take; they are aborted then.
            wait_for_old: return when the old model has stopped, not already when the new one has taken over.

        Raises:
            ModelNotReadyError: the load failed; the message is the reason, one sentence that is safe to show.
            ShuttingDownError: the server is stopping.
        """
        with self._lock:
            self._check_running()
            entry = self._table.find(source.name, source.version) or self._table.add(source)
            load = entry.load
            joined = load is not None and load.source == source
            if load is None or not joined:
                load = entry.load = Load(source)
        if joined:
            with self._lock:
                self._changed.wait_for(lambda: load.done or self._stopping.is_set())
        elif (old := self._run(entry, load)) is not None:
            run(lambda: self._leaving.retire(old, retire_timeout_s), f"retire {source.name}", wait=wait_for_old)
        if load.failure:
            raise ModelNotReadyError(load.failure)
        self._check_running()

    def unload(
        self,
        name: str,
        version: str | None = None,
        *,
        retire_timeout_s: float = RETIRE_TIMEOUT_S,
        wait_for_old: bool = True,
    ) -> None:
        """Unload a version, or all versions of a model: no new request finds it, it ends what it has, and its memory
        is given back. Blocks. Harmless when it is not loaded; a load that runs is waited for.

        Args:
            name, version: of the model.
            retire_timeout_s: how long its answers may take; they are aborted then.
            wait_for_old: return when it has stopped, not already when nobody finds it any more.

        Raises:
            ModelNotFoundError: there is no such model or version.
            ShuttingDownError: the server is stopping.
        """
        with self._lock:
            entries = self._table.matching(name, version)
        with ExitStack() as changes:
            withdrawn = []
            # The newest version first, whoever does this: two that unload one model do not wait for each other.
            for entry in entries:
                changes.enter_context(self._change(entry))
                withdrawn.append((entry, self._withdraw(entry)))
                changes.callback(self._end_unload, entry)
            rest = changes.pop_all()

        def end() -> None:
            with rest:
                for _, old in withdrawn:
                    if old is not None:
                        self._leaving.retire(old, retire_timeout_s)

        run(end, f"unload {name}", wait=wait_for_old)

    def forget(self, name: str) -> None:
        """Drop what is known of a model of which nothing is served, loaded or unloaded."""
        with self._lock:
            entries = [entry for entry in self._table.all() if entry.source.name == name]
            if not any(entry.serving or entry.load or entry.changing for entry in entries):
                self._table.remove(name)

    def engine(self, name: str, version: str | None = None) -> Engine:
        """The engine of a model, for one request; without a version that of the newest version that is ready.

        Raises:
            ModelNotFoundError: the repository has no such model or version.
            ModelNotReadyError: it loads, unloads, has failed, or the server is stopping; the message says which.
            InvalidRequestError: it takes tensors and generates no text.
        """
        return ServedEngine(self._engine(name, version), lambda: self._engine(name, version))

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """A model that takes tensors, or an LLM behind its tensor names; for one request, like `engine`.

        Raises:
            ModelNotFoundError, ModelNotReadyError: as `engine` says.
        """
        model = self._serving(name, version).model
        if takes_tensors(model):
            return ServedTensorModel(model, lambda: self._tensors(name, version))
        return self._as_tensors(self.engine(name, version))

    def config(self, name: str, version: str | None = None) -> Mapping[str, Any]:
        """The configuration that a ready model was loaded with, or has completed; see repository.config_json.

        Raises:
            ModelNotFoundError, ModelNotReadyError: as `engine` says.
        """
        serving = self._serving(name, version)
        return serving.model.config if isinstance(serving.model, Configured) else serving.source.config

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Every version of every model, by name, the newest version first."""
        with self._lock:
            entries = self._table.all()
        return tuple(map(self._status, entries))

    def default_name(self) -> str | None:
        """The model that a request means which names none: the only one, or None when there are several.

        One that was unloaded counts only when there is no other.
        """
        with self._lock:
            wanted = {entry.source.name for entry in self._table.all() if entry.serving or entry.failure != UNLOADED}
            names = wanted or {entry.source.name for entry in self._table.all()}
            return next(iter(names)) if len(names) == 1 else None

    async def drain(self, timeout_s: float) -> bool:
        """Let every model finish what it has and admit nothing more; False when the time ran out first."""
        with self._lock:
            there = self._all_serving()
        return all(await asyncio.gather(*(serving.model.drain(timeout_s) for serving in there)))

    def stop(self) -> None:
        """Stop every model, all side by side, and make running loads and unloads end soon. Blocks until all have.

        Harmless when called again. A load that completes afterwards is undone by the thread that made it.
        """
        with self._lock:
            self._stopping.set()
            there = self._all_serving()
            for entry in self._table.all():
                entry.serving = None
                entry.failure = entry.failure or STOPPED
            self._changed.notify_all()
        self._leaving.stop_all(there)

    def unfinished(self) -> int:
        """Answers that somebody waits for, of models that leave too."""
        with self._lock:
            there = self._all_serving()
        return sum(unanswered(serving.model) for serving in there)

    def stopping(self) -> tuple[str, ...]:
        """Names of models that were told to stop and have not."""
        return self._leaving.stopping()

    # Under the lock.

    def _all_serving(self) -> list[Serving]:
        return [entry.serving for entry in self._table.all() if entry.serving is not None] + self._leaving.draining()

    # Taking the lock themselves.

    def _engine(self, name: str, version: str | None) -> Engine:
        model = self._serving(name, version).model
        if is_engine(model):
            return model
        raise InvalidRequestError(
            f'Model "{name}" takes tensors: use POST /v2/models/{name}/infer or /generate.', field="model"
        )

    def _tensors(self, name: str, version: str | None) -> TensorModel:
        """A model of tensors itself, for a request that has none to go to any more."""
        model = self._serving(name, version).model
        if takes_tensors(model):
            return model
        raise ModelNotReadyError(f'Model "{name}" was replaced by another kind of model.')

    def _serving(self, name: str, version: str | None) -> Serving:
        with self._lock:
            entries = self._table.matching(name, version)
            for entry in entries:
                if entry.serving is not None:
                    return entry.serving
            newest = entries[0].copy()
        status = newest.status()  # Nothing serves, so it asks nobody.
        if status.reason:
            raise ModelNotReadyError(f'Model "{name}" is unavailable: {status.reason}')
        raise ModelNotReadyError(f'Model "{name}" is {status.state.value.lower()}.')

    def _status(self, entry: Entry) -> ModelStatus:
        while True:
            with self._lock:
                seen = entry.copy()
            status = seen.status()
            # An engine that was replaced or unloaded since, and has stopped, says nothing about the model.
            if status.state is not ModelState.UNAVAILABLE or entry.serving is seen.serving:
                return status

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ShuttingDownError(STOPPED)

    @contextmanager
    def _change(self, entry: Entry) -> Iterator[None]:
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

    def _withdraw(self, entry: Entry) -> Serving | None:
        """Let nobody find a version any more; what served it."""
        with self._lock:
            old, entry.serving, entry.unloading = entry.serving, None, True
            if old is not None:
                self._leaving.add(old)
            return old

    def _end_unload(self, entry: Entry) -> None:
        with self._lock:
            entry.unloading, entry.failure = False, UNLOADED

    def _run(self, entry: Entry, load: Load) -> Serving | None:
        """Load and take over; what answered until now. The failure, if any, is in `load`."""
        old, failure = None, FAILED
        try:
            with self._change(entry):
                model, failure = self._attempts.load(load.source, self._check_running)
                if model is not None:
                    old = self._take_over(entry, Serving(load.source, model))
        except ShuttingDownError:
            failure = STOPPED  # It waited for its turn.
        finally:
            with self._lock:
                load.done, load.failure = True, failure
                if entry.load is load:
                    entry.load = None
                if entry.serving is None and failure:
                    entry.failure = failure
                self._changed.notify_all()
        return old

    def _take_over(self, entry: Entry, new: Serving) -> Serving | None:
        """Let a new model answer; the one that did until now."""
        with self._lock:
            if not self._stopping.is_set():
                old, entry.serving = entry.serving, new
                entry.source, entry.failure = new.source, ""
                if old is not None:
                    self._leaving.add(old)
                return old
        self._leaving.stop(new)
        return None
