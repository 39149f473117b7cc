"""One request on its way through a python model: where its responses go, and whether anybody still wants them."""

from __future__ import annotations

import asyncio
import collections
import enum
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from tengserve_backend.errors import (
    DeadlineExceededError,
    ModelExecutionError,
    OverloadedError,
    RequestAbortedError,
    TengserveError,
    shown,
)
from tengserve_backend.inference import FailureReason, InferRequest, InferResponse
from tengserve_backend.python_backend.counters import Counters, RequestTimes, ResponseEnd
from tengserve_backend.python_backend.reshape import Reshape
from tengserve_backend.python_backend.sendable import check_response

if TYPE_CHECKING:
    from tengserve_backend.python_backend.relay import Relay

MAX_UNREAD_RESPONSES = 1024
MAX_UNREAD_BYTES = 32 * 2**20
"""A model that is further ahead of its client waits in `send`, or is cut off when it cannot wait."""

MAX_SEND_WAIT_S = 600.0
"""So long `send` waits for a client that reads nothing."""

FREE_SENDS_IN_VAIN = 256
SEND_IN_VAIN_S = 0.01
"""Responses that a model may send after its request has ended, and how long each further one takes it."""

_MAX_NAMED = 16
"""Requests of one call that the log names."""

_log = logging.getLogger(__name__)

_Item = InferResponse | TengserveError


class End(enum.Enum):
    """How a request ended, for the statistics."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


class OrderedAnswers:
    """Lets requests of a model answer in the order in which they came, whichever is done first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: collections.deque[Ticket] = collections.deque()
        self._ready: dict[int, _Item | None] = {}

    def enter(self, ticket: Ticket) -> None:
        """A request came."""
        with self._lock:
            self._line.append(ticket)

    def answer(self, ticket: Ticket, item: _Item | None) -> None:
        """A request is done; None when nobody wants to know. Delivers what nobody is before any more."""
        with self._lock:
            self._ready[id(ticket)] = item
            while self._line and id(self._line[0]) in self._ready:
                first = self._line.popleft()
                answer = self._ready.pop(id(first))
                if answer is not None:
                    first.hand_over(answer)


class Ticket:
    """See the module. Made on the caller's event loop; everything else but `next` may be called from any thread.

    Args:
        request: what was asked, checked against the model.
        batch: its batch size.
        counters: where its end is counted.
        ordered: the line that it stands in, if answers keep their order.
        on_end: called once, when it ended, from any thread.
        reshapes: by name, of outputs that clients get in another shape.
        loop: the caller's; None is the running one.
        outputs: names that the model may answer with; none lets it answer with any.
    """

    def __init__(
        self,
        request: InferRequest,
        batch: int,
        counters: Counters,
        ordered: OrderedAnswers | None,
        on_end: Callable[[Ticket], None],
        reshapes: Mapping[str, Reshape],
        loop: asyncio.AbstractEventLoop | None = None,
        outputs: Collection[str] = (),
    ) -> None:
        self.request = request
        self.reshapes = reshapes
        self._outputs = outputs
        self.batch = batch
        self.times = RequestTimes()
        self.level = 0
        self.queue_deadline_ns = 0
        self.signature: object = None
        self.loop = loop or asyncio.get_running_loop()
        self._counters = counters
        self._ordered = ordered
        self._on_end = on_end
        self._lock = threading.Lock()
        self._room: threading.Condition | None = None
        self._items: collections.deque[_Item] = collections.deque()
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self.relay: Relay | None = None
        # Whoever answers will `tell` when it needs the interpreter's lock no more.
        self.holds_back = False
        self._cancelled = False
        self._asked_to_end = False
        self._ended = False
        self._unread = False
        self._responses = 0
        self._in_vain = 0

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for responses any more, or its maker has asked for its end."""
        return self._cancelled or self._asked_to_end

    @property
    def ended(self) -> bool:
        """Whether it has its last response, or its error."""
        return self._ended

    @property
    def answered(self) -> bool:
        """Whether there is something to read."""
        return bool(self._items)

    def filler(self, request: InferRequest) -> Ticket:
        """A ticket that stands for nobody, in a batch with this one: it is not counted, and its answer not read."""
        made = Ticket(request, 1, Counters(per_response=False), None, lambda ticket: None, {}, self.loop)
        made._unread = True
        made.times.enqueued = made.times.taken = self.times.taken
        return made

    async def next(self, timeout_s: float) -> _Item:
        """The next response, or the error that ends the request.

        Raises:
            TimeoutError: there was none in this time.
        """
        deadline = self.loop.time() + timeout_s
        while True:
            with self._lock:
                if self._items:
                    item = self._items.popleft()
                    if _takes_room(item):
                        self._unread_bytes -= _size(item)
                        self._tell_of_room()
                    return item
                if self.loop.time() >= deadline:
                    raise TimeoutError
                waiter = self._waiter = self.loop.create_future()
            timer = self.loop.call_at(deadline, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()

    def respond(self, response: InferResponse) -> None:
        """Send a response; with `final` it ends the request. One that nobody wants is dropped.

        Blocks while the client is too far behind; on a thread that runs an event loop, which must not block, the
        request fails instead.
        """
        if self._ended:
            return
        try:
            check_response(response, self._outputs)
        except ModelExecutionError as error:
            _log.error("model %s: %s", shown(response.model), error.message)
            self.fail(error)
            return
        sent = time.monotonic_ns()
        if response.final:
            if self._counters.per_response:
                empty = not response.outputs and not response.parameters
                self._count_response(ResponseEnd.EMPTY if empty else ResponseEnd.SUCCEEDED, sent)
            self._end(response, End.CANCELLED if self._cancelled else End.SUCCEEDED)
            return
        if not self._wait_for_room():
            self.cancel()
            self.fail(RequestAbortedError("The client reads its responses too slowly."))
            return
        self._count_response(ResponseEnd.SUCCEEDED, sent)
        self.hand_over(response)

    def takes(self) -> bool:
        """Whether a response that is not the last still reaches somebody.

        Who sends on all the same, as a model may that does not ask `is_cancelled`, is slowed down, so that it takes no
        core. It is not stopped: it may have requests of others beside this one, and Triton's models need not ask.

        Raises:
            ModelExecutionError: it sends on from an event loop, which must not be slowed down for all.
        """
        if not (self._cancelled or self._ended):
            return True
        self._in_vain += 1
        if self._in_vain > FREE_SENDS_IN_VAIN:
            if _in_event_loop():
                raise ModelExecutionError("The request has ended, and its responses reach nobody.")
            time.sleep(SEND_IN_VAIN_S)
        return False

    def fail(self, error: TengserveError, *, at_once: bool = False) -> None:
        """End the request with an error; `at_once` also before requests whose answers go first."""
        if not self._ended:
            self._count_response(ResponseEnd.FAILED, time.monotonic_ns())
        # Its client may be there and be told that somebody else has cancelled it, as a sequence's other requests are.
        cancelled = self._cancelled or isinstance(error, RequestAbortedError)
        self._end(error, End.CANCELLED if cancelled else End.FAILED, at_once=at_once)

    def cancel(self) -> None:
        """Nobody waits any more. What runs learns of it through `is_cancelled`."""
        with self._lock:
            self._cancelled = True
            self._tell_of_room()

    def ask_to_end(self) -> None:
        """Its maker wants it to end. What runs learns of it through `is_cancelled`, and what it still says is read."""
        self._asked_to_end = True

    def drop(self) -> None:
        """End a cancelled request that no instance has."""
        self._end(RequestAbortedError("The request was cancelled.") if self._asked_to_end else None, End.CANCELLED)

    def abandon(self, *, decoupled: bool, model: str, version: str) -> None:
        """End a request whose sender the model has forgotten. Takes no lock: it is called by the garbage collector."""

        def end() -> None:
            if decoupled:
                self.respond(InferResponse(model, version, self.request.request_id, ()))
            else:
                self.fail(ModelExecutionError(f"Model '{model}' has let the request go without a response."))

        try:
            self.loop.call_soon_threadsafe(end)
        except RuntimeError:
            return  # The caller's loop is closed: nobody waits.

    def hand_over(self, item: _Item) -> None:
        """Put a response where the caller finds it."""
        if self._unread:
            return
        with self._lock:
            self._items.append(item)
            if _takes_room(item):
                self._unread_bytes += _size(item)
            waiter, self._waiter = self._waiter, None
        if not self.holds_back:
            self.tell()
        if waiter is not None:
            try:
                self.loop.call_soon_threadsafe(_wake, waiter)
            except RuntimeError:
                return  # The caller's loop is closed: nobody is left to read.

    def tell(self) -> None:
        """Let an event loop that stands still until the request is answered go on."""
        if self.relay is not None:
            self.relay.answered(self)

    def _count_response(self, end: ResponseEnd, sent: int) -> None:
        # A request that the model never had has no responses.
        if self._counters.per_response and self.times.called:
            self._counters.responded(
                self._responses, ResponseEnd.CANCELLED if self._cancelled else end, self.times, sent
            )
            self._responses += 1

    def _wait_for_room(self) -> bool:
        def has_room() -> bool:
            return self._cancelled or (
                len(self._items) < MAX_UNREAD_RESPONSES and self._unread_bytes < MAX_UNREAD_BYTES
            )

        with self._lock:
            if has_room():
                return True
        if _in_event_loop():
            return False
        with self._lock:
            self._room = self._room or threading.Condition(self._lock)
            # Ends early when the client leaves: then the ticket is cancelled.
            return self._room.wait_for(has_room, MAX_SEND_WAIT_S)

    def _tell_of_room(self) -> None:
        """Wake those who wait for it; under the lock."""
        if self._room is not None:
            self._room.notify_all()

    def _end(self, item: _Item | None, end: End, *, at_once: bool = False) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if end is End.SUCCEEDED:
            self._counters.succeeded(self.times, self.batch)
        elif end is End.FAILED:
            self._counters.failed(self.times, self._reason(item))
        else:
            self._counters.cancelled(self.times)
        if self._ordered is not None:
            self._ordered.answer(self, None if at_once else item)
        if item is not None and (at_once or self._ordered is None):
            self.hand_over(item)
        self._on_end(self)

    def _reason(self, error: object) -> FailureReason:
        if isinstance(error, ModelExecutionError):
            return FailureReason.BACKEND
        waited_in_vain = isinstance(error, DeadlineExceededError) and not self.times.taken
        return FailureReason.REJECTED if waited_in_vain or isinstance(error, OverloadedError) else FailureReason.OTHER


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _takes_room(item: _Item) -> TypeGuard[InferResponse]:
    """Whether it counts as unread: nothing comes after the last one that would have to wait for room."""
    return isinstance(item, InferResponse) and not item.final


def _size(response: InferResponse) -> int:
    return sum(output.size_bytes for output in response.outputs)


def named(tickets: Sequence[Ticket]) -> str:
    """Which requests these are, for the log: the ids that their clients gave them, of the first few."""
    ids = [shown(ticket.request.request_id) or "without an id" for ticket in tickets[:_MAX_NAMED]]
    more = f" and {len(tickets) - len(ids)} more" if len(tickets) > len(ids) else ""
    return f"{'request' if len(tickets) == 1 else 'requests'} {', '.join(ids)}{more}"
