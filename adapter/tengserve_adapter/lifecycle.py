"""From the first byte served to the last: load in the background, serve, notice death, drain, stop.

```
signal, early ......... nothing is loaded: end at once, status 0
listening, loading .... live, not ready; the load thread owns the loading
ready ................. every model can answer
signal ................ at once not ready and nothing admitted; after pre_drain_delay_s running answers get
                        drain_timeout_s, what is left is ended; engines stop; connections close; status 0
second signal ......... end now, status 128 + signal; after a failure, and once all is stopped, the status is kept
load failure .......... with exit_on_error: status 1 at once; else up, not ready
dead engine ........... its waiters get their errors; short grace; status 1, so that Kubernetes restarts the pod
lost device ........... the same, also while a model loads, with status 3; the interpreter does not come to its end,
                        where a library would wait for the device
```

Every wait here has a deadline, and every thread is a daemon: whatever hangs in a device driver, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tengserve_adapter.children import kill_children
from tengserve_backend.errors import TengserveError
from tengserve_backend.repository.manager import ModelManager, ModelState, ModelStatus

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

DEVICE_LOST = 3
"""Exit status when a device failed: a restart may help, and if it does not, the device needs somebody."""

WATCH_INTERVAL_S = 0.5
FAILURE_GRACE_S = 2.0
"""After an engine's death: for its errors to reach their clients, and for other models' answers."""
STOP_TIMEOUT_S = 10.0
"""For models to stop; one that has not by then ends with the process."""
QUIET_STOP_S = 1.0
"""After which the log says what is waited for."""
LOAD_STOP_TIMEOUT_S = 2.0
"""For a load to end. It may be in an import or a driver call that nothing can interrupt, and nothing of it is lost:
what a load writes, it writes atomically."""
EXIT_TIMEOUT_S = 5.0
"""For the interpreter to end: it waits for processes and threads of models that are no daemons, without a limit."""
CLOSE_TIMEOUT_S = 5
"""For answers that are complete to reach slow clients."""


class HttpServer(Protocol):
    """The part of uvicorn.Server that the lifecycle drives."""

    should_exit: bool
    listening: asyncio.Event


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the server ends.

    Attributes:
        reason: one sentence.
        exit_code: the process's status.
        drain_timeout_s: how long running answers may take.
        delay_s: how long to wait before the drain.
    """

    reason: str
    exit_code: int
    drain_timeout_s: float = FAILURE_GRACE_S
    delay_s: float = 0.0


class Worker:
    """A daemon thread that runs one blocking call, and the wait for it.

    A call that raises is logged: it must not end unseen.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._call = call
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the call has ended; False when the time ran out first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._done.wait(), timeout_s)
        return self._done.is_set()

    def _run(self) -> None:
        try:
            self._call()
        except Exception:  # noqa: BLE001 - the end of a thread: nobody above could handle it
            _log.exception("%s failed", self._thread.name)
        finally:
            # The loop is closed when the process has stopped waiting for this thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done.set)


class Lifecycle:
    """Drives one server process through its life; `run` is called once, in the main thread's event loop."""

    def __init__(
        self,
        models: ModelManager,
        *,
        drain_timeout_s: float,
        pre_drain_delay_s: float,
        exit_on_error: bool,
        announce: Callable[[], None],
        clean_up: Callable[[], None],
    ) -> None:
        """Nothing starts yet.

        Args:
            models: what to load and to stop.
            drain_timeout_s, pre_drain_delay_s, exit_on_error: as in ServerSettings.
            announce: called once, when loading has ended and a model is ready, or none was to be loaded.
            clean_up: called before the process is ended without waiting for anything; quick.
        """
        self._models = models
        self._drain_timeout_s = drain_timeout_s
        self._pre_drain_delay_s = pre_drain_delay_s
        self._exit_on_error = exit_on_error
        self._announce = announce
        self._clean_up = clean_up
        self._stop: asyncio.Future[Stop] | None = None
        self._draining = False
        self._loading: Worker | None = None

    def draining(self) -> bool:
        """Whether the server is on its way out: not ready, and nothing is admitted."""
        return self._draining

    async def run(self, server: HttpServer, serving: Awaitable[None]) -> int:
        """Serve until there is a reason to stop, then stop in order.

        Args:
            server: says when it listens, is told when to close.
            serving: the server's own run; ends soon after `should_exit` is set.

        Returns:
            The process's exit status.
        """
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.ensure_future(serving)
        http.add_done_callback(self._on_server_end)
        helpers = [asyncio.create_task(self._load(server.listening)), asyncio.create_task(self._watch_engines())]
        for helper in helpers:
            helper.add_done_callback(self._on_helper_end)
        try:
            stop = await self._stop
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        _log.log(logging.ERROR if stop.exit_code else logging.INFO, "stopping: %s", stop.reason)
        await self._shut_down(stop, server, http)
        _log.info("stopped")
        if stop.exit_code == DEVICE_LOST:
            end_now(DEVICE_LOST)
        for number in SIGNALS:
            # The event loop's handlers go with it, and the interpreter's end takes seconds.
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: end_now(stop.exit_code))
        return stop.exit_code

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop is not None and self._stop.done():
            self._end_now(self._stop.result().exit_code or 128 + number)
        self._end(Stop(f"received {number.name}", 0, self._drain_timeout_s, self._pre_drain_delay_s))

    def _on_server_end(self, http: asyncio.Future[None]) -> None:
        if not http.cancelled() and http.exception() is not None:
            _log.error("the HTTP server failed", exc_info=http.exception())
        self._end(Stop("the HTTP server ended", 1))

    def _on_helper_end(self, helper: asyncio.Task[None]) -> None:
        """A server that nobody watches must not stay up."""
        if not helper.cancelled() and helper.exception() is not None:
            _log.error("the lifecycle failed", exc_info=helper.exception())
            self._end(Stop("an internal error", 1))

    def _end(self, stop: Stop) -> None:
        self._draining = True
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(stop)

    async def _load(self, listening: asyncio.Event) -> None:
        # Loading imports torch, which would keep the event loop from starting to listen.
        await listening.wait()
        self._loading = Worker("load", self._models.load_all)
        ended = False
        while not ended:
            ended = await self._loading.wait(WATCH_INTERVAL_S)
            failed = self._models.start_failures()
            if failed and self._exit_on_error:
                # The models behind it in the queue could not change that any more.
                code = DEVICE_LOST if self._models.device_lost() else 1
                self._end(Stop("; ".join(map(_failure, failed)), code))
                return
        statuses = self._models.statuses()
        if not statuses or any(status.state is ModelState.READY for status in statuses):
            self._announce()

    async def _watch_engines(self) -> None:
        """End the process when an engine that worked no longer does, or a device does not."""
        while True:
            if lost := self._models.device_lost():
                self._end(Stop(lost, DEVICE_LOST))
                return
            for model in self._models.statuses():
                try:
                    status = self._models.engine(model.name, model.version).status()
                except TengserveError:
                    continue  # Not loaded, or failed to load: there is no engine that could die.
                if not status.alive:
                    reason = status.failure or "no reason is known"
                    died = f"the engine of model {model.name}, version {model.version} died: {reason}"
                    self._end(Stop(died, DEVICE_LOST if status.device_lost else 1))
                    return
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _shut_down(self, stop: Stop, server: HttpServer, http: Awaitable[None]) -> None:
        if unfinished := self._models.unfinished():
            _log.info(
                "%s may take up to %g s to end; a second Ctrl-C or SIGTERM ends the process at once",
                _answers(unfinished),
                stop.delay_s + stop.drain_timeout_s,
            )
        await asyncio.sleep(stop.delay_s)
        try:
            drained = await asyncio.wait_for(self._models.drain(stop.drain_timeout_s), stop.drain_timeout_s + 1.0)
        except (TimeoutError, TengserveError):
            drained = False
        if not drained and (unfinished := self._models.unfinished()):
            _log.warning("%s not complete after %g s: ending now", _answers(unfinished), stop.drain_timeout_s)
        stopped = await self._stop_models()
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(http), CLOSE_TIMEOUT_S + 1.0)
        if not stopped:
            self._end_now(stop.exit_code)
        if self._loading is not None and not await self._loading.wait(LOAD_STOP_TIMEOUT_S):
            _log.info("the load did not end in %g s; it ends with the process", LOAD_STOP_TIMEOUT_S)
            self._end_now(stop.exit_code)

    async def _stop_models(self) -> bool:
        """Stop every model; False when one has not stopped in time, and then the log tells which."""
        stopping = Worker("stop", self._models.stop)
        if await stopping.wait(min(QUIET_STOP_S, STOP_TIMEOUT_S)):
            return True
        _log.info("%s may take up to %g s to stop", _models(self._models.stopping()), STOP_TIMEOUT_S)
        if await stopping.wait(max(0.0, STOP_TIMEOUT_S - QUIET_STOP_S)):
            return True
        _log.warning(
            "%s did not stop in %g s and ends with the process", _models(self._models.stopping()), STOP_TIMEOUT_S
        )
        return False

    def _end_now(self, exit_code: int) -> None:
        _log.info("stopped at once")
        try:
            self._clean_up()
        finally:
            end_now(exit_code)


def end_early_on_signals() -> None:
    """Until the event loop handles signals, end at once: nothing is loaded, nothing is promised to anybody.

    Without a handler a process that is PID 1 of its container would not hear SIGTERM at all.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: end_now(0))


def end_in_time(exit_code: int) -> None:
    """End the process should the interpreter's own end, which begins now, take longer than EXIT_TIMEOUT_S."""
    timer = threading.Timer(EXIT_TIMEOUT_S, end_now, (exit_code,))
    timer.daemon = True
    timer.start()


def end_now(exit_code: int) -> None:
    """End the process, and the processes that models have started, without waiting for any thread."""
    kill_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"


def _models(names: Sequence[str]) -> str:
    return f"model {', '.join(names)}" if len(names) == 1 else f"models {', '.join(names)}"


def _failure(status: ModelStatus) -> str:
    return f"model {status.name}, version {status.version} failed to load: {status.reason}"
