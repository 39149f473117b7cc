"""A user's model.py as a TensorModel: its queue, its instances and its life."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from tengserve_backend.errors import (
    DeadlineExceededError,
    ModelNotReadyError,
    RequestAbortedError,
    ShuttingDownError,
    TengserveError,
)
from tengserve_backend.inference import InferRequest, InferResponse, ModelStatistics, TensorSpec
from tengserve_backend.inference.unary import infer_joined
from tengserve_backend.python_backend.api.metrics import ModelMetrics
from tengserve_backend.python_backend.bls import Bls
from tengserve_backend.python_backend.checks import check_request
from tengserve_backend.python_backend.config import PythonConfig
from tengserve_backend.python_backend.counters import Counters
from tengserve_backend.python_backend.instance import Instance
from tengserve_backend.python_backend.plain_queue import PlainQueue
from tengserve_backend.python_backend.relay import Relay
from tengserve_backend.python_backend.request_queue import TIMEOUT_EXPIRED, Waiting
from tengserve_backend.python_backend.reshape import reshaped_inputs
from tengserve_backend.python_backend.ticket import OrderedAnswers, Ticket

READY_TIMEOUT_S = 5.0
"""So long a model's `is_ready` may take, as in Triton."""

STOP_TIMEOUT_S = 30.0
"""So long a call of the model may still take once it is stopped; a thread that hangs for longer is left behind."""

ABANDON_TIMEOUT_S = 1.0
"""So long the asynchronous executions of one that hangs may take to end once they are cancelled."""

DEFAULT_REQUEST_TIMEOUT_S = 600.0
"""So long a request waits for its next response; as long as a text that is generated, when nobody says otherwise."""

_STOPPED = "The model is being unloaded."
_log = logging.getLogger(__name__)


class PythonModel:
    """See inference.TensorModel. `stop` ends its threads.

    Args:
        name, version: as in the repository.
        full_config: the whole configuration in Triton's JSON form, completed by the model itself.
        config: the same, typed.
        queue: what the instances take from.
        counters: what the instances count in.
        instances: ready ones.
        bls, metrics: what the model holds in the process.
        request_timeout_s: how long a request waits for its next response before it is ended.
    """

    def __init__(
        self,
        *,
        name: str,
        version: str,
        full_config: Mapping[str, Any],
        config: PythonConfig,
        queue: Waiting,
        counters: Counters,
        instances: Sequence[Instance],
        bls: Bls,
        metrics: ModelMetrics,
        request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._version = version
        self._full_config = full_config
        self._config = config
        self._queue = queue
        self._counters = counters
        self._instances = tuple(instances)
        self._bls = bls
        self._metrics = metrics
        self._output_names = frozenset(spec.name for spec in config.outputs)
        self._request_timeout_s = request_timeout_s
        batching = config.batching if config.sequences is None else config.sequences.batching
        keeps_order = batching is not None and batching.preserve_ordering and not config.decoupled
        self._ordered = OrderedAnswers() if keeps_order else None
        self._plain = queue if isinstance(queue, PlainQueue) else None
        # By thread, so by event loop.
        self._relays = threading.local()
        self._lock = threading.Lock()
        # Requests that have not ended, and those of them, or ended just now, whose caller is still there.
        self._active: set[Ticket] = set()
        self._awaited: set[Ticket] = set()
        self._idle = threading.Event()
        self._closing = False
        self._failure = ""
        self._check: concurrent.futures.Future[bool] | None = None
        for instance in self._instances:
            instance.watch(self._out_of_service)

    @property
    def name(self) -> str:
        """See TensorModel."""
        return self._name

    @property
    def version(self) -> str:
        """See TensorModel."""
        return self._version

    @property
    def platform(self) -> str:
        """See TensorModel."""
        return self._config.platform

    @property
    def max_batch_size(self) -> int:
        """See TensorModel."""
        return self._config.max_batch_size

    @property
    def decoupled(self) -> bool:
        """See TensorModel."""
        return self._config.decoupled

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """See TensorModel."""
        return self._config.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """See TensorModel."""
        return self._config.outputs

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration in Triton's JSON form, as the model's `auto_complete_config` left it."""
        return self._full_config

    def statistics(self) -> ModelStatistics:
        """See TensorModel."""
        return self._counters.snapshot(pending=self.pending())

    @property
    def failure(self) -> str:
        """Why it serves no more, though nobody stopped it; "" while it does."""
        return self._failure

    def unanswered(self) -> int:
        """See inference.Counting."""
        with self._lock:
            return len(self._awaited)

    def pending(self) -> int:
        """Requests that wait for an instance."""
        return len(self._queue)

    async def is_ready(self) -> bool:
        """See TensorModel. Asks the `is_ready` of every instance, if the model has one.

        Raises:
            ModelNotReadyError: an instance has died.
        """
        with self._lock:
            if self._failure:
                raise ModelNotReadyError(self._failure)
            if self._closing:
                return False
            if self._check is None or self._check.done():
                self._check = concurrent.futures.Future()
                # A thread of its own, as it may hang; there is never more than one.
                threading.Thread(
                    target=self._ask_instances, args=(self._check,), name=f"ready {self._name}", daemon=True
                ).start()
            check = self._check
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(check)), READY_TIMEOUT_S)
        except TimeoutError:
            return False

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """See TensorModel.

        Raises:
            InvalidRequestError: the tensors do not fit the model, or the request its sequence.
            OverloadedError: the queue is full, or the request has waited longer than its policy allows.
            DeadlineExceededError: the request's own timeout has passed, or the operator's for a response.
            ModelExecutionError: the model failed, or answered with an error.
            ModelNotReadyError: an instance of the model has died.
            RequestAbortedError: the model was stopped.
            ShuttingDownError: the model takes nothing new.
        """
        ticket = self._ticket(request)
        timers = self._admit(ticket)
        try:
            if (turn := self._hand_over(ticket)) is not None:
                await turn
            while True:
                item = await self._next(ticket)
                if isinstance(item, TengserveError):
                    raise item
                yield item
                if item.final:
                    return
        finally:
            self._let_go(ticket, timers)

    async def infer_whole(self, request: InferRequest) -> InferResponse:
        """See inference.unary.AnswersWhole; raises as `infer` does."""
        if self._config.decoupled:
            return await infer_joined(self, request)
        ticket = self._ticket(request)
        timers = self._admit(ticket)
        try:
            if (turn := self._hand_over(ticket)) is not None:
                await turn
            item = await self._next(ticket)
        finally:
            self._let_go(ticket, timers)
        if isinstance(item, TengserveError):
            raise item
        return item

    async def drain(self, timeout_s: float) -> bool:
        """See Servable. Requests that were given up are not waited for: `stop` gives what they still do its time."""
        with self._lock:
            # Nothing is admitted any more: once idle is always idle.
            self._closing = True
            if not self._awaited:
                self._idle.set()
        return await asyncio.to_thread(self._idle.wait, timeout_s)

    def stop(self) -> None:
        """See Servable. Harmless when called again."""
        with self._lock:
            self._closing = True
        self._queue.close()
        with self._lock:
            active = list(self._active)
        for ticket in active:
            ticket.fail(RequestAbortedError(_STOPPED))
            ticket.cancel()
        end_instances(self._instances, self._bls, self._metrics)

    def _ticket(self, request: InferRequest) -> Ticket:
        batch = check_request(self._name, self._config, request)
        request = reshaped_inputs(request, self._config.input_reshapes)
        if self._config.sequences is not None:
            request = self._config.sequences.controlled(request)
        return Ticket(
            request,
            batch,
            self._counters,
            self._ordered,
            self._ended,
            self._config.output_reshapes,
            outputs=self._output_names,
        )

    async def _next(self, ticket: Ticket) -> InferResponse | TengserveError:
        try:
            return await ticket.next(self._request_timeout_s)
        except TimeoutError:
            self._deadline(ticket)
            # It may have its answer already, and hang behind others that do not.
            raise DeadlineExceededError(TIMEOUT_EXPIRED) from None

    def _let_go(self, ticket: Ticket, timers: Sequence[asyncio.TimerHandle]) -> None:
        """Nobody reads on."""
        for timer in timers:
            timer.cancel()
        if not ticket.ended:
            ticket.cancel()
            if self._queue.remove(ticket):
                ticket.drop()
            if ticket.relay is not None:
                ticket.relay.forget(ticket)
        self._left(ticket)

    def _hand_over(self, ticket: Ticket) -> asyncio.Future[None] | None:
        """Wake an instance for a request that was admitted; see Relay.hand_over for what it returns."""
        if self._plain is None:
            return None  # An instance that could take it is awake already.
        if self._config.decoupled:
            self._plain.wake(1)
            return None
        relay: Relay | None = getattr(self._relays, "relay", None)
        if relay is None or relay.loop is not ticket.loop:
            relay = self._relays.relay = Relay(ticket.loop, self._plain.wake)
        return relay.hand_over(ticket)

    def _admit(self, ticket: Ticket) -> Sequence[asyncio.TimerHandle]:
        request = ticket.request
        with self._lock:
            if self._failure:
                raise ModelNotReadyError(self._failure)
            if self._closing:
                raise ShuttingDownError(_STOPPED)
            self._active.add(ticket)
            self._awaited.add(ticket)
            if self._ordered is not None:
                self._ordered.enter(ticket)
        try:
            wait_s = self._queue.put(ticket)
        except TengserveError as error:
            # Counted, and out of the line of those who wait for their turn to answer.
            ticket.fail(error)
            self._left(ticket)
            raise
        if self.failure:
            # It came too late for `_out_of_service` to see.
            ticket.fail(ModelNotReadyError(self.failure))
        if request.cancellation is not None:
            request.cancellation.listen(lambda: self._asked_to_end(ticket))
        if wait_s is None and not request.timeout_us:
            return ()
        timers = []
        if wait_s is not None:
            timers.append(ticket.loop.call_later(wait_s, self._queue.expire, ticket))
        if request.timeout_us and not self._queue.bounds_timeout(ticket):
            timers.append(ticket.loop.call_later(request.timeout_us / 1e6, self._deadline, ticket))
        return timers

    def _asked_to_end(self, ticket: Ticket) -> None:
        ticket.ask_to_end()
        if self._queue.remove(ticket):
            ticket.drop()

    def _deadline(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        # Whoever is before it in line may be what hangs.
        ticket.fail(DeadlineExceededError(TIMEOUT_EXPIRED), at_once=True)
        ticket.cancel()

    def _ended(self, ticket: Ticket) -> None:
        with self._lock:
            self._active.discard(ticket)

    def _left(self, ticket: Ticket) -> None:
        """The caller is gone, with an answer or without."""
        with self._lock:
            self._awaited.discard(ticket)
            if self._closing and not self._awaited:
                self._idle.set()

    def _out_of_service(self, failure: str) -> None:
        """An instance has died: nothing new is taken, and what waits for an instance ends."""
        with self._lock:
            self._failure = self._failure or failure
            active = list(self._active)
        waiting = [ticket for ticket in active if self._queue.remove(ticket)]
        self._queue.close()
        for ticket in waiting:
            ticket.fail(ModelNotReadyError(failure))

    def _ask_instances(self, check: concurrent.futures.Future[bool]) -> None:
        try:
            check.set_result(all(instance.user_ready() for instance in self._instances))
        except BaseException:  # noqa: BLE001 - a user's is_ready may raise anything; then the model is not ready
            _log.exception("model %s: is_ready failed", self._name)
            check.set_result(False)


def end_instances(instances: Sequence[Instance], bls: Bls, metrics: ModelMetrics) -> None:
    """Wait for the threads of instances whose queue is closed, and give back what their model holds. Blocks."""
    bls.stop()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    hung = [one for one in instances if not one.join(max(0.0, deadline - time.monotonic()))]
    for instance in hung:
        instance.abandon()
    for instance in hung:
        # Whose asynchronous executions were the reason ends now.
        if not instance.join(ABANDON_TIMEOUT_S):
            _log.error("model %s hangs in its own code; its thread is left behind", instance.name)
    metrics.close()
