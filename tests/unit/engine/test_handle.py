"""How the events of a request reach its owner: by iterating, or past it while nobody has any to work off."""

from __future__ import annotations

import asyncio

import pytest

from tengserve_backend.engine.handle import GenerationHandle
from tengserve_backend.generation import Finish, FinishReason, TokenEvent


def event(token_id: int, *, last: bool = False) -> TokenEvent:
    return TokenEvent(token_id, "", 1.0, Finish(FinishReason.LENGTH, 1, token_id, seed=1) if last else None)


class Owner:
    """Iterates in a task of its own, each event when it is let, and taps."""

    def __init__(self) -> None:
        self.aborted = 0
        self.handle = GenerationHandle("r", 1, asyncio.get_running_loop(), self._abort)
        self.iterated: list[int] = []
        self.tapped: list[int] = []
        self.takes = True
        self.free = asyncio.Event()
        self.free.set()
        self.task = asyncio.create_task(self._read())

    def _abort(self) -> None:
        self.aborted += 1

    async def _read(self) -> None:
        self.handle.tap(self._tap)
        try:
            async for each in self.handle:
                self.iterated.append(each.token_id)
                await self.free.wait()
        finally:
            self.handle.abort()

    def _tap(self, each: TokenEvent) -> bool:
        if each.token_id == 13:
            raise LookupError("unlucky")
        if self.takes:
            self.tapped.append(each.token_id)
        return self.takes

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_who_waits_is_not_woken_for_an_event_that_the_tap_takes():
    owner = Owner()
    await owner.settle()
    for number in (1, 2):
        owner.handle.deliver(event(number))
    await owner.settle()
    owner.takes = False
    owner.handle.deliver(event(3))
    await owner.settle()
    owner.takes = True
    owner.handle.deliver(event(4, last=True))
    await owner.task
    assert (owner.tapped, owner.iterated, owner.aborted) == ([1, 2], [3, 4], 0)


async def test_no_event_overtakes_one_that_its_owner_still_works_on():
    owner = Owner()
    await owner.settle()
    owner.takes = False
    owner.free.clear()
    owner.handle.deliver(event(1))
    owner.takes = True
    # The owner is about to read the first, and then works on it.
    owner.handle.deliver(event(2))
    await owner.settle()
    owner.handle.deliver(event(3))
    await owner.settle()
    assert (owner.tapped, owner.iterated) == ([], [1])
    owner.free.set()
    await owner.settle()
    owner.handle.deliver(event(4))
    owner.handle.deliver(event(5, last=True))
    await owner.task
    assert (owner.tapped, owner.iterated) == ([4], [1, 2, 3, 5])


async def test_what_the_tap_raises_comes_out_where_its_owner_reads_and_ends_the_request():
    owner = Owner()
    await owner.settle()
    owner.handle.deliver(event(13))
    owner.handle.deliver(event(14))
    with pytest.raises(LookupError):
        await owner.task
    assert owner.aborted == 1
    owner.handle.deliver(event(15, last=True))
    assert owner.tapped == []
