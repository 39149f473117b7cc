"""The model repository while the server runs: what is on the disk now, and loading and unloading by request or by poll.

The names of the modes and the texts of their refusals are Triton's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tengserve_backend.errors import (
    ConfigurationError,
    ControlError,
    ErrorCode,
    ModelNotFoundError,
    ModelNotReadyError,
    TengserveError,
    shown,
)
from tengserve_backend.inference import TensorModel
from tengserve_backend.repository.config_json import parse_config_json
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.overlays import Overlays
from tengserve_backend.repository.pbtxt import ConfigFile
from tengserve_backend.repository.scan import (
    check_repository,
    is_model_name,
    model_folders,
    model_sources,
    scan_model,
    scan_repository,
    warn_of_name,
)
from tengserve_backend.repository.source import ModelSource

_MAX_FILES = 10_000
"""Files of a model that a poll looks at; one with more is only noticed by the first ones."""

_MAX_TOLD = 100
"""Folders with names that are no text which the log tells of."""

_ALL = "*"

_TRITONS_REFUSAL = "explicit model load / unload is not allowed if polling is enabled"
"""Clients look for it at the beginning of the message."""

_log = logging.getLogger(__name__)

_Fingerprint = tuple[tuple[str, int, int], ...]


def first_sources(root: Path, mode: ControlMode, names: Sequence[str]) -> tuple[ModelSource, ...]:
    """What the server loads at its start.

    Args:
        root: the repository.
        mode: with EXPLICIT only the models that are named, else all.
        names: of models; none means no model, "*" means all.

    Raises:
        ConfigurationError: the repository or a model is wrong, or one that is named is missing.
    """
    if mode is not ControlMode.EXPLICIT:
        return scan_repository(root)
    check_repository(root)
    folders = {folder.name: folder for folder in model_folders(root)}
    wanted = list(dict.fromkeys(names))
    if _ALL in wanted:
        wanted = list(folders)
    for name in wanted:
        if name not in folders:
            known = ", ".join(folders) or "none"
            raise ConfigurationError(f'the model repository has no model "{shown(name)}"; it has {shown(known)}')
    return tuple(source for name in wanted for source in scan_model(folders[name]))


@dataclass(slots=True, eq=False)
class _Flight:
    """A load that others who ask for the same wait for."""

    done: threading.Event = field(default_factory=threading.Event)
    failure: TengserveError | None = None


class LiveRepository:
    """Changes what a ModelManager serves; also what a user's model.py may ask and change (python_backend's Peers).

    Every method may block for as long as a model loads, and be called from any thread at any time.
    """

    def __init__(self, root: Path, mode: ControlMode, manager: ModelManager, overlays: Overlays) -> None:
        """Nothing is read yet but, for polls, the state of the disk.

        Args:
            root: the repository.
            mode: who decides what is loaded.
            manager: serves the models; it calls `overlays.release` for what it has stopped.
            overlays: keeps the files of load requests.
        """
        self.mode = mode
        self._root = root
        self._manager = manager
        self._overlays = overlays
        self._lock = threading.Lock()
        self._flights: dict[object, _Flight] = {}
        self._failures: dict[str, str] = {}
        self._seen: dict[str, _Fingerprint] = {}
        self._told: set[str] = set()
        if mode is ControlMode.POLL:
            self._seen = {folder.name: _fingerprint(folder) for folder in self._folders()}

    def names(self) -> list[str]:
        """The models that are on the disk now. Those that are not, and were unloaded, are forgotten.

        Raises:
            ControlError: the repository cannot be read.
        """
        try:
            names = [folder.name for folder in self._folders()]
        except ConfigurationError as error:
            raise ControlError(error.message) from error.__cause__
        statuses = self._manager.statuses()
        kept = {*names, *(status.name for status in statuses if not status.unloaded)}
        for gone in {status.name for status in statuses} - kept:
            self._manager.forget(gone)
        return names

    def failures(self) -> dict[str, str]:
        """Models whose folder or configuration could not be read when they were to be loaded, and why."""
        with self._lock:
            return dict(self._failures)

    def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model as it is on the disk now, or load it anew; blocks until its versions are ready.

        Who asks for the same while it loads waits for that load. Versions that the version policy does not choose any
        more are unloaded.

        Args:
            name: of the model.
            config_json: a configuration in place of the one on the disk.
            files: path in the model's folder to content, in place of that folder; they need a configuration.

        Raises:
            ControlError: the mode forbids it, or it failed; what was served before still is.
            InvalidRequestError: a file's path.
            ShuttingDownError: the server is stopping.
        """
        self._check_explicit()
        given = dict(files or {})
        if given and config_json is None:
            raise ControlError(
                f"failed to load '{shown(name)}', override model directory requires a model config to be given",
                code=ErrorCode.INVALID_ARG,
            )
        folder = self._root / name
        named = is_model_name(name)
        if not named or (not given and not folder.is_dir()):
            # INTERNAL is Triton's for a model that is not there; a name that no model can have is the client's fault.
            code = ErrorCode.INTERNAL if named else ErrorCode.INVALID_ARG
            raise ControlError(f"failed to load '{shown(name)}', failed to poll from model repository", code=code)
        key = (name, config_json, tuple(sorted(given.items())), () if given else _fingerprint(folder))
        with self._lock:
            flight = self._flights.get(key)
            first = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not first:
            flight.done.wait()
        else:
            try:
                self._load(name, config_json, given)
            except TengserveError as error:
                flight.failure = error
            except BaseException:
                flight.failure = ControlError(f"failed to load '{name}'; the server's log says why")
                raise
            finally:
                with self._lock:
                    del self._flights[key]
                flight.done.set()
        if flight.failure is not None:
            raise flight.failure

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """See ModelManager."""
        return self._manager.tensor_model(name, version)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Let no new request find a model; what runs ends in the background. Harmless when it is not loaded.

        Args:
            name: of the model.
            unload_dependents: changes nothing, as no model here depends on another one.

        Raises:
            ControlError: the mode forbids it.
            ModelNotFoundError: there is no such model, on the disk or loaded.
            ShuttingDownError: the server is stopping.
        """
        self._check_explicit()
        try:
            self._manager.unload(name, wait_for_old=False)
        except ModelNotFoundError:
            if not (is_model_name(name) and (self._root / name).is_dir()):
                raise
        with self._lock:
            self._failures.pop(name, None)

    def poll(self) -> None:
        """Compare the disk with the last look at it: load what is new or was changed, unload what is gone.

        A model that fails is told in the log and in `failures`, and tried again when it has changed.
        """
        folders = {folder.name: folder for folder in self._folders()}
        for name, folder in folders.items():
            now = _fingerprint(folder)
            if self._seen.get(name) != now:
                self._seen[name] = now
                try:
                    self._load(name, None, {})
                except TengserveError as error:
                    _log.error("model %s: %s", shown(name), error.message)
        for name in [name for name in self._seen if name not in folders]:
            del self._seen[name]
            with self._lock:
                self._failures.pop(name, None)
            try:
                self._manager.unload(name, wait_for_old=False)
            except ModelNotFoundError:
                continue  # It never was a model.

    def _folders(self) -> list[Path]:
        return model_folders(self._root, self._warn_once)

    def _warn_once(self, name: str) -> None:
        """Clients make this look at the disk as often as they like, so a name is told once."""
        with self._lock:
            if name in self._told or len(self._told) >= _MAX_TOLD:
                return
            self._told.add(name)
        warn_of_name(name)

    def _check_explicit(self) -> None:
        if self.mode is ControlMode.EXPLICIT:
            return
        # Triton says the same where nothing is polled.
        raise ControlError(
            f"{_TRITONS_REFUSAL} (the model control mode is {self.mode.value}; this server loads by request when it is"
            " started with --model-control-mode explicit)",
            code=ErrorCode.UNAVAILABLE,
        )

    def _load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        self._forget_gone(name)
        folder = self._overlays.write(name, files) if files else self._root / name
        try:
            sources = _sources(folder, config_json)
        except ConfigurationError as error:
            with self._lock:
                self._failures[name] = error.message
            # Clients look for the first half.
            text = f"failed to load '{name}', failed to poll from model repository: {error.message}"
            raise ControlError(text, code=ErrorCode.INVALID_ARG) from None
        else:
            with self._lock:
                self._failures.pop(name, None)
            self._apply(name, sources)
        finally:
            self._overlays.drop(folder)

    def _apply(self, name: str, sources: Sequence[ModelSource]) -> None:
        failures = []
        for source in sources:
            self._overlays.use(source)
            try:
                self._manager.load(source, wait_for_old=False)
            except TengserveError as error:
                self._overlays.release(source)
                if not isinstance(error, ModelNotReadyError):
                    raise
                failures.append(f"version {source.version} is at UNAVAILABLE state: {error.message};")
        if failures:
            raise ControlError(f"load failed for model '{name}': {' '.join(failures)}", code=ErrorCode.INVALID_ARG)
        wanted = {source.version for source in sources}
        for status in self._manager.statuses():
            if status.name == name and status.version not in wanted and not status.unloaded:
                self._manager.unload(name, status.version, wait_for_old=False)

    def _forget_gone(self, name: str) -> None:
        """Names of models that are served no more and are not on the disk must not pile up."""
        there = {name, *self.names()}
        for gone in {status.name for status in self._manager.statuses()} - there:
            self._manager.forget(gone)
        with self._lock:
            self._failures = {name: reason for name, reason in self._failures.items() if name in there}


def _sources(folder: Path, config_json: str | None) -> list[ModelSource]:
    if config_json is None:
        return scan_model(folder)
    what = "the configuration of the request"
    config = parse_config_json(config_json, what)
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return model_sources(folder, ConfigFile(what, config, parameters, {}))


def _fingerprint(folder: Path) -> _Fingerprint:
    """Path, time and size of every file of a model; what changes while it is read is left out."""
    found: list[tuple[str, int, int]] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                stat = os.stat(path)
            except OSError:
                continue
            # Python writes caches beside a user's model.py when it runs that.
            if not name.endswith(".pyc"):
                found.append((path, stat.st_mtime_ns, stat.st_size))
            if len(found) >= _MAX_FILES:
                return tuple(sorted(found))
    return tuple(sorted(found))
