"""ModelControl over the server's own repository: what HTTP and gRPC call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from tengserve_adapter.control import IndexRow, JsonObject, SettingValue
from tengserve_adapter.observability.switches import LogSettings, TraceSettings
from tengserve_adapter.protocols.repository import statistics_json, tensors_config
from tengserve_adapter.threads import Threads
from tengserve_backend.errors import (
    ControlError,
    ErrorCode,
    ModelNotFoundError,
    ModelNotReadyError,
    RequestError,
    ShuttingDownError,
    TengserveError,
    shown,
)
from tengserve_backend.repository.config_json import config_json, from_json
from tengserve_backend.repository.live import LiveRepository
from tengserve_backend.repository.manager import ModelManager, ModelState
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.source import Backend

_log = logging.getLogger(__name__)


class RepositoryControl:
    """See ModelControl. Made and used in one event loop; what blocks runs in threads of its own, which end with it."""

    def __init__(self, live: LiveRepository, manager: ModelManager, *, draining: Callable[[], bool]) -> None:
        """Nothing runs yet.

        Args:
            live: the repository.
            manager: serves its models.
            draining: whether nothing new is to be begun.
        """
        self._live = live
        self._manager = manager
        self._draining = draining
        self._looks, self._changes = Threads("looks at"), Threads("changes of")
        self._log = LogSettings()
        self._trace = TraceSettings()

    @asynccontextmanager
    async def polling(self, every_s: float) -> AsyncIterator[None]:
        """While inside, compare the repository with the disk this often, once the start has come to every model.

        Does nothing in another mode than POLL.
        """
        if self._live.mode is not ControlMode.POLL:
            yield
            return
        task = asyncio.create_task(self._poll(every_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def index(self, *, ready_only: bool) -> Sequence[IndexRow]:
        """See ModelControl."""
        names = await self._looks.run(self._live.names)
        failures = self._live.failures()
        statuses = self._manager.statuses()
        if ready_only:
            return [IndexRow(s.name, s.version, s.state.value) for s in statuses if s.state is ModelState.READY]
        rows = [IndexRow(status.name, status.version, status.state.value, status.reason) for status in statuses]
        known = {row.name for row in rows}
        for name in names:
            if name not in known:
                failed = name in failures
                rows.append(IndexRow(name, "", "UNAVAILABLE" if failed else "", failures.get(name, "")))
        return sorted(rows, key=lambda row: (row.name, int(row.version or 0)))

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        """See ModelControl."""
        await self._change(name, "load", lambda: self._live.load(name, config_json, files))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See ModelControl."""
        try:
            await self._change(name, "unload", lambda: self._live.unload(name, unload_dependents=unload_dependents))
        except ModelNotFoundError as error:
            raise _unknown(name, "") from error

    def config(self, name: str, version: str) -> JsonObject:
        """See ModelControl. An LLM's config.pbtxt names no tensors; they are filled in."""
        try:
            config = self._manager.config(name, version or None)
            if config.get("backend") != Backend.TENGSERVE.value:
                return config
            model = self._manager.tensor_model(name, version or None)
        except ModelNotFoundError as error:
            raise _unknown(name, version) from error
        full = {
            **config,
            "input": tensors_config(model.inputs, inputs=True),
            "output": tensors_config(model.outputs, inputs=False),
            "model_transaction_policy": {"decoupled": model.decoupled},
        }
        return config_json(from_json(full, "the configuration"))

    def statistics(self, name: str, version: str) -> Sequence[JsonObject]:
        """See ModelControl.

        Raises:
            ControlError: no version of that name is ready.
        """
        rows = []
        for status in self._manager.statuses():
            if name in ("", status.name) and version in ("", status.version) and status.state is ModelState.READY:
                with contextlib.suppress(ModelNotFoundError, ModelNotReadyError):  # It was unloaded just now.
                    model = self._manager.tensor_model(status.name, status.version)
                    rows.append(statistics_json(status.name, status.version, model.statistics()))
        if name and not rows:
            text = f"requested model '{shown(name)}'" + (f", version {shown(version)}" if version else "")
            raise ControlError(f"{text} is not available", code=ErrorCode.INVALID_ARG)
        return rows

    def trace_settings(self, model: str, changes: Mapping[str, Sequence[str] | None]) -> Mapping[str, Sequence[str]]:
        """See ModelControl."""
        if model and all(status.name != model for status in self._manager.statuses()):
            raise _unknown(model, "")
        return self._trace.update(model, changes)

    def log_settings(self, changes: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
        """See ModelControl."""
        return self._log.update(changes)

    async def _change(self, name: str, verb: str, change: Callable[[], None]) -> None:
        """Load or unload a model in a thread; the log tells how it ended, also when its caller has gone by then.

        What the client sent besides the name (a configuration, files) may be secret, and is not logged, but for the one
        value that a reason complains of.
        """
        begun = False

        def told() -> None:
            nonlocal begun
            begun = True
            began = time.monotonic()
            try:
                change()
            except TengserveError as error:
                _log.warning("model %s: a client's %s %s: %s", shown(name), verb, _ending(error), error.message)
                raise
            except Exception as error:
                # Who asked logs the whole of it.
                _log.error("model %s: a client's %s failed: %s", shown(name), verb, type(error).__name__)
                raise
            _log.info("model %s: %sed for a client in %.1f s", shown(name), verb, time.monotonic() - began)

        try:
            if self._draining():
                raise ShuttingDownError("The server is stopping.")
            await self._changes.run(told)
        except TengserveError as error:
            if not begun:
                _log.warning("model %s: a client's %s was refused: %s", shown(name), verb, error.message)
            raise

    async def _poll(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if not self._manager.started() or self._draining():
                continue
            try:
                await self._changes.run(self._live.poll)
            except TengserveError as error:
                _log.error("the model repository was not polled: %s", error.message)
            except Exception:  # noqa: BLE001 - a disk may fail in many ways, and the next poll may succeed
                _log.exception("the model repository was not polled")


def _ending(error: TengserveError) -> str:
    """Whether anything was tried."""
    refused = isinstance(error, (RequestError, ShuttingDownError)) or (
        isinstance(error, ControlError) and error.code is ErrorCode.UNAVAILABLE
    )
    return "was refused" if refused else "failed"


def _unknown(name: str, version: str) -> ModelNotFoundError:
    which = f" version {shown(version)}" if version else ""
    return ModelNotFoundError(f"Request for unknown model: '{shown(name)}'{which} is not found", field="model")
