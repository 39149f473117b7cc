"""`tengserve` with models that do what stdin says, for tests of the server's life: no torch, no timing.

Lines on stdin, each answered with "did <line>" on stderr:

- `load`: the model that is being loaded is ready.
- `fail`: it fails to load.
- `token`: every running generation makes one token; its first one it makes unasked.
- `finish`: every running generation ends.
- `confuse`: asking the engine for its status fails, which must never happen.
- `hang`: the engine will not stop when it is told to.
- `die`: the engine is dead, and its generations fail.
- `lose`: so it is because its device failed; said to a load, it ends with that.

The flag --stuck makes a load ignore the server's stop, as a device driver might; with --lingers the interpreter does
not come to its end, and says "lingers" on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import AsyncIterator

from support.engine_status import engine_status
from tengserve_adapter import cli, lifecycle, server
from tengserve_backend.engine.base import EngineStatus, ModelInfo, Tap
from tengserve_backend.errors import (
    ConfigurationError,
    DeviceLostError,
    EngineFailedError,
    RequestAbortedError,
    ShuttingDownError,
)
from tengserve_backend.generation import Finish, FinishReason, GenerationRequest, ModelLimits, TokenEvent
from tengserve_backend.repository.source import ModelSource, Progress


class ScriptedGeneration:
    def __init__(self, engine: ScriptedEngine, request: GenerationRequest) -> None:
        self.request_id = request.request_id
        self.prompt_tokens = 3
        self._engine = engine
        self._made = 0
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()

    def token(self, *, last: bool) -> None:
        self._made += 1
        finish = Finish(FinishReason.LENGTH, self.prompt_tokens, self._made, seed=1) if last else None
        self._put(TokenEvent(self._made, f"t{self._made} ", 1.0, finish))

    def fail(self, error: Exception) -> None:
        self._put(error)

    def tap(self, tap: Tap) -> None:
        pass

    def abort(self) -> None:
        self._engine.forget(self)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if event.finish is not None:
            self._engine.forget(self)
        return event

    def _put(self, event: TokenEvent | Exception) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class ScriptedEngine:
    def __init__(self, source: ModelSource) -> None:
        limits = ModelLimits(max_seq_len=256, max_input_len=128, max_iter_times=128)
        self.info = ModelInfo(source.name, source.version, "Scripted", 320, limits, False, "cpu", "float32", "none")
        self._running: set[ScriptedGeneration] = set()
        self._draining = False
        self._failure: str | None = None
        self._device_lost = False
        self._hangs = False
        self._confused = False
        self._idle: asyncio.Event | None = None

    async def submit(self, request: GenerationRequest) -> ScriptedGeneration:
        if self._failure:
            raise EngineFailedError(self._failure)
        if self._draining:
            raise ShuttingDownError("The server is stopping.")
        generation = ScriptedGeneration(self, request)
        self._running.add(generation)
        generation.token(last=False)
        return generation

    def forget(self, generation: ScriptedGeneration) -> None:
        self._running.discard(generation)
        if self._idle is not None and not self._running:
            self._idle.set()

    def status(self) -> EngineStatus:
        if self._confused:
            raise RuntimeError("confused")
        running = len(self._running)
        return engine_status(
            failure=self._failure,
            device_lost=self._device_lost,
            running_requests=running,
            free_blocks=8 - running,
            generated_tokens=5,
        )

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        self._idle = asyncio.Event()
        if not self._running:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._running

    def stop(self) -> None:
        if self._hangs:
            threading.Event().wait()
        for generation in list(self._running):
            generation.fail(RequestAbortedError("The server stopped before the answer was complete."))

    def do(self, command: str) -> None:
        self._hangs = self._hangs or command == "hang"
        self._confused = self._confused or command == "confuse"
        self._device_lost = self._device_lost or command == "lose"
        if command in ("die", "lose"):
            self._failure = "The device is gone."
        for generation in list(self._running):
            if command in ("die", "lose"):
                generation.fail(EngineFailedError("The device is gone."))
            else:
                generation.token(last=command == "finish")


class Script:
    """Reads stdin in a thread and hands each line to the load or to the engines."""

    def __init__(self, *, stuck: bool) -> None:
        self._stuck = stuck
        self._loads: queue.Queue[str] = queue.Queue()
        self._engines: list[ScriptedEngine] = []
        threading.Thread(target=self._read, daemon=True).start()

    def load(self, source: ModelSource, progress: Progress, _peers: object, **_options: object) -> ScriptedEngine:
        if self._stuck:
            progress("waiting for the device", 0.0)
            threading.Event().wait()
        while True:
            progress("waiting for the script", 0.5)
            try:
                command = self._loads.get(timeout=0.02)
            except queue.Empty:
                continue
            if command == "fail":
                raise ConfigurationError("The weights are damaged.")
            if command == "lose":
                raise DeviceLostError("The device is gone.")
            engine = ScriptedEngine(source)
            self._engines.append(engine)
            return engine

    def _read(self) -> None:
        for line in sys.stdin:
            command = line.strip()
            if command in ("load", "fail") or not self._engines:
                self._loads.put(command)
            else:
                for engine in self._engines:
                    engine.do(command)
            sys.stderr.write(f"did {command}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    script = Script(stuck="--stuck" in sys.argv)
    server.load_model = script.load
    lifecycle.STOP_TIMEOUT_S = lifecycle.LOAD_STOP_TIMEOUT_S = 0.5
    status = cli.main([argument for argument in sys.argv[1:] if argument not in ("--stuck", "--lingers")])
    if "--lingers" in sys.argv:
        sys.stderr.write("lingers\n")
        sys.stderr.flush()
        threading.Event().wait()
    raise SystemExit(status)
