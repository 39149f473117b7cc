"""Requests wait for others only where others come, and where the event loop has enough to do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tengserve_backend.python_backend import gathering
from tengserve_backend.python_backend.gathering import FEWEST, MAX_PAUSE, MOST, Gathering

Group = Callable[..., int]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Let a group begin for which so many requests come, a tenth of a millisecond apart; with how many it was tried."""
    clock = SimpleNamespace(now=0.0, computed=0.0)
    monkeypatch.setattr(
        gathering, "time", SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.computed)
    )

    def run(one: Gathering, there: int, *, soon: bool = True, busy: float = 0.9) -> int:
        one.begin(soon=soon)
        limit = one.limit
        count = min(limit, there)
        for _ in range(count - 1):
            clock.now += 1e-4
            clock.computed += busy * 1e-4
            one.came()
        if count < limit:
            clock.now += gathering.GATHER_S
        if limit > 1:
            one.end(count, complete=count == limit)
        return limit

    return run


def test_a_request_that_comes_long_after_the_others_waits_for_nobody(group: Group) -> None:
    one = Gathering()
    assert [group(one, 16, soon=False) for _ in range(100)] == [1] * 100


@pytest.mark.parametrize("there", [FEWEST, 5, MOST, 16])
def test_as_many_as_come_are_waited_for(group: Group, there: int) -> None:
    one = Gathering()
    assert group(one, there) == MOST
    limits = [group(one, there, soon=False) for _ in range(2000)]
    expected = min(there, MOST)
    assert set(limits) <= {expected, MOST}
    # Whether there are more is tried ever less often.
    assert limits.count(MOST) <= 12 or there >= MOST


@pytest.mark.parametrize(("there", "busy"), [(1, 1.0), (FEWEST - 1, 1.0), (16, 0.3)])
def test_where_waiting_is_in_vain_it_is_tried_ever_less_often(group: Group, there: int, busy: float) -> None:
    one = Gathering()
    limits = [group(one, there, busy=busy) for _ in range(16)]
    # After none, 1, 3 and 7 requests that went as they came.
    assert [index for index, limit in enumerate(limits) if limit > 1] == [0, 2, 6, 14]
    for _ in range(10_000):
        group(one, there, busy=busy)
    assert sum(group(one, there, busy=busy) > 1 for _ in range(10 * (MAX_PAUSE + 1))) == 10


def test_nobody_waits_for_those_that_have_left(group: Group) -> None:
    one = Gathering()
    for _ in range(10):
        group(one, 16)
    assert group(one, 1) == MOST
    assert group(one, 1, soon=False) == 1
    # Should they come back, they are noticed at once.
    assert [group(one, 16) for _ in range(2)] == [MOST, MOST]


@pytest.mark.parametrize("there", [FEWEST, 4, 7, MOST, 16])
@pytest.mark.parametrize("in_time", [1, 3, 5])
def test_where_answers_come_late_it_is_tried_ever_less_often(group: Group, there: int, in_time: int) -> None:
    """A model that is quick with one request and not with many at once."""
    one = Gathering()
    vain = 0
    for _ in range(10_000):
        count = min(group(one, there), there)
        if count > max(1, in_time):
            vain += 1
            one.too_many(count)
    # Each time with as many as come, and with half of them.
    assert vain <= 2 * (10_000 // (MAX_PAUSE + 1) + 10)


def test_of_many_that_took_too_long_together_half_are_waited_for(group: Group) -> None:
    one = Gathering()
    group(one, MOST)
    one.too_many(MOST)
    assert group(one, MOST) == MOST // 2
    one.too_many(FEWEST)
    assert group(one, MOST) == 1
