"""One instance of a user's model: a thread that imports the file, makes the class, and calls it with batches."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, ModelExecutionError, foreign_reason
from tengserve_backend.python_backend.api.errors import TritonModelException
from tengserve_backend.python_backend.api.messages import InferenceRequest, InferenceResponse
from tengserve_backend.python_backend.api.module import NAME, enter
from tengserve_backend.python_backend.api.sender import InferenceResponseSender
from tengserve_backend.python_backend.counters import Counters
from tengserve_backend.python_backend.namespace import Namespace
from tengserve_backend.python_backend.request_queue import Waiting
from tengserve_backend.python_backend.ticket import Ticket, named

MAX_OVERLAPPING_REQUESTS = 4096
"""Requests that one instance with an asynchronous, decoupled `execute` has at the same time; others wait."""

CLASS = "TritonPythonModel"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstanceSetup:
    """What all instances of a model share.

    Attributes:
        model, version: as in the repository.
        model_dir, version_dir: its folders.
        filename: of the class, in the version folder.
        decoupled: whether a request may have any number of responses.
        outputs: names of the model's outputs.
        module: the python_backend API for this model.
        queue: where requests come from.
        counters: where executions are counted.
    """

    model: str
    version: str
    model_dir: Path
    version_dir: Path
    filename: str
    decoupled: bool
    outputs: tuple[str, ...]
    module: types.ModuleType
    queue: Waiting
    counters: Counters


def load_class(setup: InstanceSetup) -> tuple[Namespace, Any]:
    """Import the model's file into a namespace of its own; the namespace and its class TritonPythonModel.

    Raises:
        ConfigurationError: the file raises, or has no such class.
    """
    enter(setup.module)
    namespace = Namespace((setup.version_dir, setup.model_dir), {NAME: setup.module})
    try:
        loaded = namespace.load(setup.filename)
        made = getattr(loaded, CLASS, None)
        if not inspect.isclass(made):
            raise ConfigurationError(f"{setup.filename} has no class {CLASS}")
        if not callable(getattr(made, "execute", None)):
            raise ConfigurationError(f"{setup.filename}: {CLASS} has no method execute")
    except ConfigurationError:
        namespace.close()
        raise
    except BaseException as error:  # The operator's own code ran: it may raise anything.
        namespace.close()
        raise ConfigurationError(f"{setup.filename} failed: {said(setup, error)}") from error
    return namespace, made


def said(setup: InstanceSetup, error: BaseException) -> str:
    """An exception of the model in one line, without a traceback or a path."""
    return f"{type(error).__name__}: {foreign_reason(error, str(setup.model_dir))}"


class Instance:
    """See the module. Starts at once; `ready` tells how. Ends when the queue is closed.

    Whatever a model does fails its requests. Should the thread end by anything else, its requests fail, and `watch`
    tells.

    Args:
        setup: of the model.
        number: among the model's instances.
        name: as in Triton, such as "model_0_1".
        kind, device_id: what the model is told.
        config: the whole configuration.
    """

    def __init__(
        self, setup: InstanceSetup, *, number: int, name: str, kind: str, device_id: int, config: dict[str, Any]
    ) -> None:
        self.name = name
        self.ready: Future[None] = Future()
        self._setup = setup
        self._number = number
        self._args = {
            "model_config": json.dumps(config),
            "model_instance_kind": kind,
            "model_instance_name": name,
            "model_instance_device_id": str(device_id),
            "model_repository": str(setup.model_dir),
            "model_version": setup.version,
            "model_name": setup.model,
        }
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._overlapping = 0
        self._changed = threading.Condition()
        self._abandoned = False
        self._running: list[Ticket] = []
        self._failure = ""
        self._watcher: Callable[[str], None] | None = None
        # A daemon, as a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, once the queue is closed; False when the model's code has not come back by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Let the thread end without `finalize` when its call comes back after all."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call a function, from any thread and once, when the instance has died: with a sentence for clients."""
        with self._changed:
            self._watcher = watcher
            failure = self._failure
        if failure:
            watcher(failure)

    def user_ready(self) -> bool:
        """What the model's own `is_ready` says; True without one. Blocks as long as that takes.

        Raises:
            Exception: whatever it raises.
        """
        enter(self._setup.module)
        check = getattr(self._model, "is_ready", None)
        if not callable(check):
            return True
        answer = check()
        if inspect.iscoroutine(answer):
            answer = self._submit(answer).result()
        if not isinstance(answer, bool):
            raise TritonModelException("is_ready() must return a boolean value")
        return answer

    def _run(self) -> None:
        try:
            namespace, made = load_class(self._setup)
        except ConfigurationError as error:
            self.ready.set_exception(error)
            return
        try:
            self._serve(made)
        except BaseException as error:  # noqa: BLE001 - nobody may wait for ever for a thread that is gone
            self._die(error)
        finally:
            self._end_loop()
            # What it holds goes now: the collector may come late to an instance, or never when it has been frozen.
            self._model = None
            namespace.close()

    def _die(self, error: BaseException) -> None:
        """Out of service: what this thread has and what would wait for it ends."""
        failure = f"Instance '{self.name}' of the model has died; the server's log says why."
        if not self.ready.done():
            self.ready.set_exception(ConfigurationError(failure))
        for ticket in self._running:
            ticket.fail(ModelExecutionError(failure))
        with self._changed:
            self._failure = failure
            watcher = self._watcher
        if watcher is not None:
            watcher(failure)
        _log.critical("model %s: its thread has died, and the model is out of service", self.name, exc_info=error)

    def _serve(self, made: Any) -> None:
        try:
            self._model = made()
            if callable(getattr(self._model, "initialize", None)):
                self._model.initialize(self._args)
        except BaseException as error:  # noqa: BLE001 - a user's model may raise anything; it is why loading fails
            failure = ConfigurationError(f"initialize failed: {said(self._setup, error)}")
            failure.__cause__ = error
            self.ready.set_exception(failure)
            return
        self.ready.set_result(None)
        while (batch := self._setup.queue.take(self._number)) is not None:
            self._running = batch
            self._execute(batch)
            self._running = []
            for ticket in batch:
                if ticket.holds_back:
                    ticket.tell()
        self._wait_for_overlapping(0)
        if self._abandoned or not callable(getattr(self._model, "finalize", None)):
            return
        try:
            self._model.finalize()
        except BaseException:  # noqa: BLE001 - the model's end must not keep the others from ending
            _log.exception("model %s: finalize failed", self.name)

    def _execute(self, batch: list[Ticket]) -> None:
        setup = self._setup
        live = []
        for ticket in batch:
            if ticket.cancelled or ticket.ended:
                ticket.drop()
            else:
                live.append(ticket)
        if not live:
            return
        now = time.monotonic_ns()
        requests: list[InferenceRequest] = []
        senders: list[InferenceResponseSender] = []
        try:
            for ticket in live:
                ticket.times.called = now
                sender = InferenceResponseSender(
                    ticket, decoupled=setup.decoupled, model=setup.model, version=setup.version
                )
                senders.append(sender)
                requests.append(setup.module.InferenceRequest.received(ticket, sender, setup.outputs))
            setup.counters.executed()
            returned = self._model.execute(requests)
            if inspect.iscoroutine(returned):
                if setup.decoupled:
                    self._overlap(returned, live, senders)
                    return
                returned = self._submit(returned).result()
            self._came_back(live)
            self._answer(requests, senders, live, returned)
            setup.counters.answered(_batch_size(live), live[0].times)
        except BaseException as error:  # noqa: BLE001 - whatever a user's model raises ends its requests, not the server
            self._fail(live, senders, error)

    def _overlap(self, coroutine: Any, tickets: list[Ticket], senders: list[InferenceResponseSender]) -> None:
        """Run one asynchronous execution beside others."""
        self._wait_for_overlapping(MAX_OVERLAPPING_REQUESTS - len(tickets))
        with self._changed:
            self._overlapping += len(tickets)

        def done(future: Future[Any]) -> None:
            with self._changed:
                self._overlapping -= len(tickets)
                self._changed.notify_all()
            error: BaseException | None = None
            if future.cancelled():
                error = ModelExecutionError(f"Model '{setup_model}' is being unloaded.")
            elif (error := future.exception()) is None and future.result() is not None:
                error = _returned_in_decoupled_mode(self.name)
            if error is not None:
                self._fail(tickets, senders, error)
            else:
                self._came_back(tickets)

        setup_model = self._setup.model
        self._submit(coroutine).add_done_callback(done)

    def _wait_for_overlapping(self, limit: int) -> None:
        with self._changed:
            # Ends with the executions, or with `abandon`, which the model's `stop` calls in time.
            self._changed.wait_for(lambda: self._overlapping <= max(0, limit) or self._abandoned)

    def _answer(
        self,
        requests: list[InferenceRequest],
        senders: list[InferenceResponseSender],
        tickets: list[Ticket],
        returned: Any,
    ) -> None:
        setup = self._setup
        if setup.decoupled:
            if returned is not None:
                raise _returned_in_decoupled_mode(self.name)
            return
        if returned is None and all(request.asked_for_sender for request in requests):
            return  # Answered through the senders, or about to be.
        if not isinstance(returned, list):
            raise _ApiError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise _ApiError(
                f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for response, request in zip(returned, requests, strict=True):
            if not isinstance(response, InferenceResponse) and not (response is None and request.asked_for_sender):
                raise _ApiError(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        for response, sender, ticket in zip(returned, senders, tickets, strict=True):
            if response is None:
                continue
            if not sender.close():
                raise _ApiError("Unable to send response. Response sender has been closed.")
            # Were the event loop woken here, it would find the interpreter's lock taken and sleep once more.
            ticket.holds_back = True
            response.answer(ticket, setup.model, setup.version, final=True)

    def _fail(self, tickets: list[Ticket], senders: list[InferenceResponseSender], error: BaseException) -> None:
        message = f"Failed to process the request(s) for model instance '{self.name}'"
        try:
            self._came_back(tickets)
            for sender in senders:
                sender.close()
            if isinstance(error, _ApiError):
                text = str(error)
            elif isinstance(error, ModelExecutionError):
                text = error.message
            else:
                text = said(self._setup, error)
            message += f", message: {text}"
        finally:
            for ticket in tickets:
                ticket.fail(ModelExecutionError(message))
        _log.error("%s (%s)", message, named(tickets), exc_info=None if isinstance(error, _ApiError) else error)

    def _came_back(self, tickets: list[Ticket]) -> None:
        """Count the end of a call, once."""
        if tickets[0].times.returned:
            return
        now = time.monotonic_ns()
        for ticket in tickets:
            ticket.times.returned = now
        self._setup.counters.came_back(_batch_size(tickets), tickets[0].times)

    def _submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the instance's event loop, which starts with the first."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=_serve_loop, args=(self._loop,), name=f"loop {self.name}", daemon=True
                )
                self._loop_thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end_loop(self) -> None:
        with self._changed:
            loop, self._loop = self._loop, None
        if loop is not None and self._loop_thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._loop_thread.join()


class _ApiError(Exception):
    """A model breaks a rule of `execute`; the text is the API's own."""


def _returned_in_decoupled_mode(instance: str) -> _ApiError:
    return _ApiError(
        f"Python model '{instance}' is using the decoupled mode and the execute function must return None."
    )


def _batch_size(tickets: list[Ticket]) -> int:
    return sum([ticket.batch for ticket in tickets])


def _serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        # SystemExit and KeyboardInterrupt of a task come out here as well, and whoever waits for the task or for others
        # still has to hear of their ends.
        with contextlib.suppress(BaseException):
            loop.run_forever()
            break
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
