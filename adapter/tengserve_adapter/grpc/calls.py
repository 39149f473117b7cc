"""What every RPC is wrapped in: bytes to a message, errors to a status, and a bound on how many run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, NoReturn

import grpc
from prometheus_client import Counter

from tengserve_adapter.grpc.schema import Message, parse
from tengserve_adapter.grpc.status import status_of
from tengserve_adapter.observability.metrics import GRPC_REQUESTS
from tengserve_backend.errors import OverloadedError, ShuttingDownError

INLINE_BYTES: Final = 256 * 1024
"""A larger message is parsed in a worker thread: about a millisecond of work is what the event loop can spare."""
RETRY_AFTER_S: Final = 1

Unary = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]
"""An RPC with one request and one response, both as their bytes."""


class ClientGoneError(Exception):
    """Nobody is there to take a message."""


class Gate:
    """At most so many at once; the next one is refused, not kept waiting."""

    def __init__(self, limit: int, what: str) -> None:
        """The gate is open.

        Args:
            limit: how many.
            what: their name, for the refusal.
        """
        self._limit = limit
        self._what = what
        self._inside = 0

    def enter(self, count: int = 1) -> Entered:
        """A context that is inside; entering it raises OverloadedError when the gate is full.

        Args:
            count: as how many.
        """
        return Entered(self, count)

    def take(self, count: int) -> None:
        """Go in; whoever does must `leave`.

        Raises:
            OverloadedError: it is full.
        """
        if self._inside + count > self._limit:
            raise OverloadedError(
                f"the server has {self._inside} {self._what} and takes at most {self._limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._inside += count

    def leave(self, count: int) -> None:
        """Go out."""
        self._inside -= count


class Entered:
    """A context inside a gate. A class, as a generator would take several times as long, in every call."""

    __slots__ = ("_count", "_gate")

    def __init__(self, gate: Gate, count: int) -> None:
        """See Gate.enter."""
        self._gate = gate
        self._count = count

    def __enter__(self) -> None:
        self._gate.take(self._count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave(self._count)


class Subscriptions:
    """Calls that last for as long as their clients like; they are bounded, and end when the server closes."""

    def __init__(self, limit: int) -> None:
        """None is open.

        Args:
            limit: how many may be.
        """
        self._gate = Gate(limit, "open subscriptions")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(self, call: Awaitable[None], context: grpc.aio.ServicerContext) -> None:
        """Run one in this task; errors become its status."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker: this is a coroutine
        try:
            with self._gate.enter():
                self._tasks.add(task)
                try:
                    await call
                finally:
                    self._tasks.discard(task)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            await fail(context, ShuttingDownError("The service is stopping."))
        except ClientGoneError:
            return
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a status, the unexpected is logged
            await fail(context, error)

    def close(self) -> None:
        """End them all."""
        self._closed = True
        for task in self._tasks:
            task.cancel()


async def parsed(data: bytes, parse_bytes: Callable[[bytes], Any]) -> Any:
    """What `parse_bytes` makes of a message, in a worker thread when it is big."""
    if len(data) <= INLINE_BYTES:
        return parse_bytes(data)
    return await asyncio.to_thread(parse_bytes, data)


async def write(context: grpc.aio.ServicerContext, message: Message) -> None:
    """Write a message to a stream; returns when the transport has taken it.

    Raises:
        ClientGoneError: the call has ended on the client's side.
    """
    try:
        await context.write(message.SerializeToString())
    except grpc.aio.InternalError:
        raise ClientGoneError from None


async def fail(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the error's status; raises grpc's own exception, which ends the handler."""
    code, message = status_of(error)
    await context.abort(code, message)
    raise AssertionError("abort has returned")


def unary(method: str, call: Unary) -> grpc.RpcMethodHandler:
    """The handler of an RPC with one request and one response.

    Args:
        method: its name.
        call: takes the request's bytes and what they came with, and gives those of the response.
    """

    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with counted(method) as outcome:
            try:
                serialized = await call(data, context)
            except Exception as error:  # noqa: BLE001 - the edge: every error becomes a status, the unexpected is logged
                outcome.code, message = status_of(error)
                await context.abort(outcome.code, message)
            outcome.code = grpc.StatusCode.OK
        return serialized

    return grpc.unary_unary_rpc_method_handler(handle)


class counted:  # noqa: N801 - used as the function that it would be, were a generator not slower
    """Counts one request of a method by how it ended.

    Attributes:
        code: how; CANCELLED unless told otherwise.
    """

    __slots__ = ("_method", "code")

    def __init__(self, method: str) -> None:
        """Args: method: its name."""
        self._method = method
        self.code = grpc.StatusCode.CANCELLED

    def __enter__(self) -> counted:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _requests(self._method, self.code).inc()


@functools.cache
def _requests(method: str, code: grpc.StatusCode) -> Counter:
    """The counter of one method and code. There are few; looking it up by its labels takes a lock each time."""
    return GRPC_REQUESTS.labels(method, code.name)


def of_message(kind: type[Message], call: Callable[[Message], Awaitable[Message]]) -> Unary:
    """A unary call that takes its message parsed, and gives one."""

    async def parse_and_call(data: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        response = await call(await parsed(data, lambda raw: parse(kind, raw)))
        serialized: bytes = response.SerializeToString()
        return serialized

    return parse_and_call
