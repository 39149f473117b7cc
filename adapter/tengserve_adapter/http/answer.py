"""Running one call: submit it, carry its events to the client, and leave nothing behind however it ends."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Send

from tengserve_adapter.http.errors import body_for
from tengserve_adapter.http.sse import DirectWriter, EventStream, send_json
from tengserve_adapter.protocols.call import Call, Reply
from tengserve_backend.engine.base import Engine, Generation
from tengserve_backend.errors import DeadlineExceededError, GenerationFailedError
from tengserve_backend.generation import GenerationRequest, TokenEvent

GRACE_S: Final = 5.0
"""How long after its timeout a request waits for the engine to end it. Past that the engine is taken for dead."""

_SILENT: Final = "The engine did not answer in time."

_LAST_WORDS_S: Final = 1.0
"""How long a client that does not read is given to take the error that ends its stream."""


async def answer(
    engine: Engine, call: Call, send: Send, *, writer: DirectWriter | None = None, grace_s: float = GRACE_S
) -> None:
    """Submit a call and send its answer.

    The generation is aborted however this ends: by its last event, by an error, or by cancellation, which is how a
    client's disconnect arrives here. A stream's failure after its first event is told in the stream.

    Raises:
        TengserveError: before anything was sent.
    """
    stream = EventStream(send, writer=writer)
    failure: Exception
    try:
        # One timer for the whole request bounds the engine as well as a client that stops reading.
        async with asyncio.timeout(call.request.timeout_s + grace_s):
            generation = await engine.submit(call.request)
            try:
                if call.stream:
                    await _stream(generation, call.reply, stream)
                else:
                    await send_json(send, answer_of(call.reply, await _collect(generation)))
            finally:
                generation.abort()
        return
    except TimeoutError:
        failure = DeadlineExceededError(_SILENT)
    except Exception as error:  # noqa: BLE001 - whatever fails after the first event must be told in the stream
        failure = error
    if not stream.started:
        raise failure
    await _end_with(stream, failure)


async def _stream(generation: Generation, reply: Reply, stream: EventStream) -> None:
    def send_now(event: TokenEvent) -> bool:
        if not stream.ready:
            return False
        stream.event_now(reply.event(event))
        return True

    generation.tap(send_now)
    async for event in generation:
        await stream.event(reply.event(event))
        if event.finish is not None:
            await stream.end()
            return
    raise _no_end()


async def _collect(generation: Generation) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    async for event in generation:
        events.append(event)
        if event.finish is not None:
            return events
    raise _no_end()


async def whole_answer(engine: Engine, request: GenerationRequest) -> list[TokenEvent]:
    """Submit a request and wait for all its events; the last one has `finish`. It is aborted if this is cancelled.

    Raises:
        TengserveError: the engine's, or its silence.
    """
    try:
        async with asyncio.timeout(request.timeout_s + GRACE_S):
            generation = await engine.submit(request)
            try:
                return await _collect(generation)
            finally:
                generation.abort()
    except TimeoutError:
        raise DeadlineExceededError(_SILENT) from None


def answer_of(reply: Reply, events: list[TokenEvent]) -> bytes:
    """The JSON of the whole answer."""
    finish = events[-1].finish
    if finish is None:
        raise _no_end()
    return reply.answer(events, finish)


def _no_end() -> GenerationFailedError:
    return GenerationFailedError("The engine ended the answer without a reason.")


async def _end_with(stream: EventStream, error: Exception) -> None:
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await stream.event(body_for(error))
            await stream.end()
    except TimeoutError:
        # The client does not read: leaving the response open makes the server close the connection.
        return
