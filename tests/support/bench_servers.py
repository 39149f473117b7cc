"""Servers that a load is put on, made of data: when each piece of an answer comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.requests import Chunk, Prompt, Request

Schedule = Sequence[tuple[float, Chunk]]
"""Pieces of an answer, each with the seconds since the one before, the first since the request."""


def request(output_tokens: int = 3, *, input_tokens: int = 5, counted: bool = True) -> Request:
    return Request(Prompt("a b c", tuple(range(input_tokens))), output_tokens, counted)


def token(number: int = 0, text: str = "x") -> Chunk:
    return Chunk(text=text, ids=(number,))


def tokens(*delays: float) -> Schedule:
    return [(delay, token(number)) for number, delay in enumerate(delays)]


def server(schedule: Callable[[Request], Schedule], *, at_once: int = 1_000_000) -> Ask:
    """A server that answers so many requests at once; others wait in line."""
    free = asyncio.Semaphore(at_once)

    async def ask(request: Request) -> AsyncIterator[Chunk]:
        async with free:
            for delay, chunk in schedule(request):
                await asyncio.sleep(delay)
                yield chunk

    return ask
