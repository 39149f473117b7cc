"""What the manager keeps of each model version, and what it tells of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TypeGuard

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ModelNotFoundError, shown
from tengserve_backend.inference.model import Counting, MayFail, TensorModel
from tengserve_backend.repository.source import ModelSource

UNLOADED = "unloaded"
"""The reason of a version that somebody asked to unload; Triton's word, which its clients compare."""


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
        reason: "" unless UNAVAILABLE; UNLOADED, or one sentence that is safe to show to a client.
    """

    name: str
    version: str
    state: ModelState
    reason: str

    @property
    def unloaded(self) -> bool:
        """Whether it is not served because somebody asked for that."""
        return self.state is ModelState.UNAVAILABLE and self.reason == UNLOADED


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """A loaded model and what it was loaded from."""

    source: ModelSource
    model: Engine | TensorModel


@dataclass(slots=True, eq=False)
class Load:
    """A load that was asked for, for others who want the same to wait for."""

    source: ModelSource
    done: bool = False
    failure: str = ""


@dataclass(slots=True, eq=False)
class Entry:
    """One version; written under the manager's lock only.

    Attributes:
        source: what was loaded last, or is to be loaded first.
        serving: what answers.
        failure: why nothing answers, once that is known.
        load: the load that was asked for last and has not ended.
        changing: somebody loads or unloads it, and others wait.
        unloading: the model it had drains.
    """

    source: ModelSource
    serving: Serving | None = None
    failure: str = ""
    load: Load | None = None
    changing: bool = False
    unloading: bool = False

    def copy(self) -> Entry:
        """For whoever reads it outside the lock."""
        return replace(self)

    def status(self) -> ModelStatus:
        """Asks the engine, so not under the lock."""
        state, reason = ModelState.LOADING, ""
        if self.unloading:
            state = ModelState.UNLOADING
        elif self.serving is not None:
            state, reason = _state_of(self.serving.model)
        elif self.failure and self.load is None:
            state, reason = ModelState.UNAVAILABLE, self.failure
        return ModelStatus(self.source.name, self.source.version, state, reason)


class Table:
    """The entries; whoever uses it holds the manager's lock."""

    def __init__(self) -> None:
        # By name, the newest version first: the order in which a request without a version tries them.
        self._entries: dict[str, list[Entry]] = {}

    def all(self) -> list[Entry]:
        """Every version, by name, the newest first."""
        return [entry for name in sorted(self._entries) for entry in self._entries[name]]

    def find(self, name: str, version: str) -> Entry | None:
        """One version, None when it is not known."""
        return next((entry for entry in self._entries.get(name, ()) if entry.source.version == version), None)

    def add(self, source: ModelSource) -> Entry:
        """A version that is not known yet."""
        entry = Entry(source)
        versions = self._entries.setdefault(source.name, [])
        versions.append(entry)
        versions.sort(key=lambda entry: int(entry.source.version), reverse=True)
        return entry

    def remove(self, name: str) -> None:
        """Forget a model; harmless when it is not known."""
        self._entries.pop(name, None)

    def matching(self, name: str, version: str | None) -> list[Entry]:
        """One version of a model, or all.

        Raises:
            ModelNotFoundError: there is none.
        """
        entries = self._entries.get(name)
        if entries is None:
            raise ModelNotFoundError(f'There is no model "{shown(name)}".', field="model")
        if version is None:
            return list(entries)
        entry = self.find(name, version)
        if entry is None:
            raise ModelNotFoundError(f'Model "{shown(name)}" has no version "{shown(version)}".', field="version")
        return [entry]


def is_engine(model: Engine | TensorModel) -> TypeGuard[Engine]:
    """Whether a loaded model generates; any other takes tensors."""
    return hasattr(model, "submit")


def takes_tensors(model: Engine | TensorModel) -> TypeGuard[TensorModel]:
    """The opposite of `is_engine`."""
    return hasattr(model, "infer")


def unanswered(model: Engine | TensorModel) -> int:
    """Answers that a model owes somebody, as far as it counts them."""
    if is_engine(model):
        status = model.status()
        return status.running_requests + status.waiting_requests
    return model.unanswered() if isinstance(model, Counting) else 0


def _state_of(model: Engine | TensorModel) -> tuple[ModelState, str]:
    if not is_engine(model):
        # Its own `is_ready` may run a user's code: only who asks whether this one model is ready waits for that.
        failure = model.failure if isinstance(model, MayFail) else ""
        return (ModelState.UNAVAILABLE, failure) if failure else (ModelState.READY, "")
    engine = model.status()
    if engine.alive:
        return ModelState.READY, ""
    return ModelState.UNAVAILABLE, engine.failure or "The engine has stopped."
