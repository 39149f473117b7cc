"""How many requests of a model are handed over to its threads together."""

from __future__ import annotations

import time

MOST = 8
"""Requests that are handed over together at most: their answers come together too, while the event loop waits."""

FEWEST = 3
"""With fewer at once, clients would wait for each other longer than changes of threads take."""

GATHER_S = 0.002
"""So long a request waits at most for others to come."""

SOON_S = 0.0003
"""A request that comes so soon after others were handed over may be one of many."""

BUSY = 0.5
"""A loop that computes for less than this part of the time would have answered at once."""

MAX_PAUSE = 512
"""Groups after which it is tried again whether more come, when it was in vain time and again."""


class Gathering:
    """Finds out how many requests are worth waiting for.

    A change of threads costs a request of a small model more than the model does, and eight that are handed over
    together share it. But nobody may wait for requests that do not come. So now and then a group waits for as many as
    there can be: as many as come then, while the loop has enough to do with them, are waited for from then on. Where
    fewer come, or they keep the loop waiting, requests go on as they come, and it is tried again after 1, 3, 7, ...
    groups.

    Belongs to one event loop, and is used in its thread.
    """

    def __init__(self) -> None:
        self._expected = self._limit = 1
        # Groups until it is tried again, and those of them that were.
        self._pause = self._paused = self._pause_before = 0
        self._began = self._computed = self._came = self._busy = 0.0

    @property
    def limit(self) -> int:
        """With how many the group that began last is complete."""
        return self._limit

    def begin(self, *, soon: bool) -> None:
        """The first request of a group is there.

        Args:
            soon: it came within SOON_S of the last hand-over.
        """
        self._limit = self._expected
        self._pause_before = self._pause
        if self._paused < self._pause:
            self._paused += 1
        elif (soon or self._expected > 1) and self._expected < MOST:
            self._limit = MOST
            self._began = self._came = time.monotonic()
            self._computed = self._busy = time.thread_time()

    def came(self) -> None:
        """Another one is there."""
        if self._limit > self._expected:
            self._came, self._busy = time.monotonic(), time.thread_time()

    def end(self, count: int, *, complete: bool) -> None:
        """A group is handed over.

        Args:
            count: its requests.
            complete: whether it reached its limit before it was GATHER_S old.
        """
        before, tried = self._expected, self._limit > self._expected
        if complete and not tried:
            return
        busy = not tried or self._busy - self._computed >= BUSY * (self._came - self._began)
        self._expected = count if count >= FEWEST and busy else 1
        if tried:
            self._wait(found=self._expected > before)

    def too_many(self, count: int) -> None:
        """The answers of so many together did not come while the event loop waited: they were not worth it."""
        self._expected = count // 2 if count // 2 >= FEWEST else 1
        self._pause = self._pause_before
        self._wait(found=False)

    def _wait(self, *, found: bool) -> None:
        self._pause = self._pause // 2 if found else min(2 * self._pause + 1, MAX_PAUSE)
        self._paused = 0
