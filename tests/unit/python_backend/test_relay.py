"""An event loop waits for a model that answers at once, and for no other."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from support.python_models import IO, answer, ask, first_output, fp32, model, until
from tengserve_backend.errors import OverloadedError, RequestAbortedError, ShuttingDownError
from tengserve_backend.inference import InferResponse
from tengserve_backend.inference.unary import infer_once
from tengserve_backend.python_backend import gathering, plain_queue, relay
from tengserve_backend.python_backend.counters import Counters
from tengserve_backend.python_backend.plain_queue import PlainQueue
from tengserve_backend.python_backend.relay import Relay
from tengserve_backend.python_backend.ticket import Ticket

NEVER_S = 60.0

# Gives back what it gets; a request "block" waits until the file "go" is there.
ECHO = """
    import os
    import time
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].request_id() == "block":
                while not os.path.exists(pb_utils.get_model_dir() + "/go"):
                    time.sleep(0.001)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
                for request in requests
            ]
"""


def ticket() -> Ticket:
    counters = Counters(per_response=False)
    return Ticket(ask(), 1, counters, None, lambda ticket: None, {}, asyncio.get_running_loop())


def respond(one: Ticket) -> None:
    one.respond(InferResponse("m", "1", "", ()))


def relay_to(wake: Callable[[int], None]) -> Relay:
    return Relay(asyncio.get_running_loop(), wake)


def in_thread(*tickets: Ticket) -> None:
    threading.Thread(target=lambda: [respond(one) for one in tickets], daemon=True).start()


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for others, however close behind others it comes."""
    monkeypatch.setattr(relay, "SOON_S", -NEVER_S)


def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request waits for others, however slow this machine is just now."""
    monkeypatch.setattr(relay, "SOON_S", NEVER_S)


async def test_an_answer_that_comes_at_once_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    for _ in range(3):
        one = ticket()
        assert relay_to(lambda count, one=one: in_thread(one)).hand_over(one) is None
        assert one.answered


@pytest.mark.parametrize("most", [4, 8])
async def test_requests_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    monkeypatch.setattr(gathering, "MOST", most)
    # As many as there can be are handed over at once, fewer after a while.
    monkeypatch.setattr(relay, "GATHER_S", NEVER_S if most == 4 else 0.001)
    first, *others = (ticket() for _ in range(5))
    woken: list[int] = []

    def wake(count: int) -> None:
        woken.append(count)
        in_thread(*(others if len(woken) > 1 else [first]))

    one = relay_to(wake)
    assert one.hand_over(first) is None
    together(monkeypatch)
    turns = [one.hand_over(each) for each in others]
    assert woken == ([1, 4] if most == 4 else [1])
    assert [turn is None for turn in turns] == [False, False, False, most == 4]
    for turn in turns:
        if turn is not None:
            await turn
    assert woken == [1, 4]
    assert all(each.answered for each in others)


async def test_requests_for_a_slow_model_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", 0.001)
    woken: list[int] = []
    one = relay_to(woken.append)
    assert one.hand_over(ticket()) is None
    together(monkeypatch)
    assert [one.hand_over(ticket()) for _ in range(10)] == [None] * 10
    assert woken == [1] * 11


async def test_a_group_that_takes_too_long_does_not_make_its_model_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = [ticket()]
    one = relay_to(lambda count: in_thread(*answered))
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    one.hand_over(answered[0])
    together(monkeypatch)
    monkeypatch.setattr(relay, "PATIENCE_S", 0.001)
    answered = []
    turns = [one.hand_over(ticket()) for _ in range(gathering.MOST)]
    assert all(turn is not None and turn.done() for turn in turns[:-1])
    assert turns[-1] is None
    # Fewer are waited for, and the loop waits for their answers as before.
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    answered = [ticket() for _ in range(gathering.MOST // 2)]
    assert [one.hand_over(each) is None for each in answered] == [False] * (len(answered) - 1) + [True]
    assert all(each.answered for each in answered)


async def test_a_slow_model_is_not_waited_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one(monkeypatch)
    waits: list[float] = []
    monkeypatch.setattr(relay, "PATIENCE_S", 0.001)
    one = relay_to(lambda count: None)
    opened = one._door

    class Door:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            return opened.acquire(timeout=timeout)

    monkeypatch.setattr(one, "_door", Door())
    for _ in range(100):
        assert one.hand_over(ticket()) is None
    # After none, 1, 3, 7, 15 and 31 requests that were not waited for.
    assert len(waits) == 6
    monkeypatch.setattr(one, "_door", opened)


async def test_whoever_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    first, left = ticket(), ticket()
    one = relay_to(lambda count: in_thread(first))
    assert one.hand_over(first) is None
    together(monkeypatch)
    turn = one.hand_over(left)
    one.forget(left)
    assert turn is not None
    await turn
    assert not left.answered


async def test_what_was_answered_before_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
    one = ticket()
    respond(one)
    assert relay_to(lambda count: None).hand_over(one) is None


async def test_the_loop_goes_on_once_the_model_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with model(tmp_path, ECHO) as m:
        monkeypatch.setattr(relay, "PATIENCE_S", NEVER_S)
        answered: list[bool] = []
        wait = Relay._answered_at_once

        def watched(one: Relay) -> bool:
            answered.append(wait(one))
            return answered[-1]

        monkeypatch.setattr(Relay, "_answered_at_once", watched)
        for _ in range(3):
            assert await first_output(m) == [1, 2]
        assert answered == [True] * 3


async def test_many_requests_get_their_own_answers(tmp_path: Path) -> None:
    with model(tmp_path, ECHO, IO + "instance_group [{ count: 3 kind: KIND_CPU }]") as m:

        async def client(number: int) -> None:
            for turn in range(20):
                value = float(100 * number + turn)
                response = await infer_once(m, ask(fp32("IN", value)))
                assert response.outputs[0].data.tolist() == [value]

        await asyncio.gather(*map(client, range(20)))
        assert m.statistics().success[0] == 400
        assert m.unanswered() == m.pending() == 0


async def test_the_loop_goes_on_beside_a_slow_model(tmp_path: Path) -> None:
    with model(tmp_path, ECHO) as m:
        slow = asyncio.create_task(infer_once(m, ask(request_id="block")))
        # Whatever the loop does comes to its end while the model hangs in its call.
        behind = [asyncio.create_task(infer_once(m, ask())) for _ in range(10)]
        await until(lambda: m.pending() == 10)
        assert not any(task.done() for task in (slow, *behind))
        behind[0].cancel()
        assert isinstance((await asyncio.gather(behind[0], return_exceptions=True))[0], asyncio.CancelledError)
        (tmp_path / "m" / "1" / "go").touch()
        await asyncio.gather(slow, *behind[1:])
        assert m.statistics().cancel[0] == 1


async def test_a_request_that_is_cancelled_before_it_was_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model(tmp_path, ECHO) as m:
        together(monkeypatch)
        await infer_once(m, ask())
        tasks = [asyncio.create_task(infer_once(m, ask())) for _ in range(3)]
        # Each has its turn, in which it is gathered; none has been handed over yet.
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done] == [InferResponse, asyncio.CancelledError, InferResponse]
        assert await first_output(m) == [1, 2]


async def test_a_model_that_is_stopped_ends_what_was_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model(tmp_path, ECHO) as m:
        together(monkeypatch)
        await infer_once(m, ask())
        tasks = [asyncio.create_task(infer_once(m, ask())) for _ in range(3)]
        asyncio.get_running_loop().call_soon(m.stop)
        for one in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(one, RequestAbortedError | ShuttingDownError)


async def test_several_loops_ask_one_model(tmp_path: Path) -> None:
    with model(tmp_path, ECHO) as m:

        def elsewhere() -> list[object]:
            return [asyncio.run(first_output(m)) for _ in range(3)]

        results = await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(4)))
        assert results == [[[1, 2]] * 3] * 4
        assert (await answer(m, ask())).outputs[0].data.tolist() == [1, 2]


async def test_the_queue_gives_requests_in_their_order() -> None:
    queue = PlainQueue()
    tickets = [ticket() for _ in range(4)]
    for one in tickets:
        assert queue.put(one) is None
    assert len(queue) == 4
    assert queue.remove(tickets[1])
    assert not queue.remove(tickets[1])
    assert [queue.take(0) for _ in range(3)] == [[tickets[0]], [tickets[2]], [tickets[3]]]
    assert not queue.remove(tickets[0])
    assert len(queue) == 0


async def test_a_full_queue_refuses_and_a_closed_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_queue, "MAX_QUEUED_REQUESTS", 2)
    queue = PlainQueue()
    queue.put(ticket())
    queue.put(ticket())
    with pytest.raises(OverloadedError, match="Exceeds maximum queue size"):
        queue.put(ticket())
    queue.close()
    assert (len(queue), queue.take(0)) == (0, None)
    with pytest.raises(ShuttingDownError):
        queue.put(ticket())


def test_a_queue_gives_back_what_it_has_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = os.pipe()
    monkeypatch.setattr(os, "pipe", lambda: pipe)
    queue = PlainQueue()
    queue.close()
    os.fstat(pipe[0])
    del queue
    for end in pipe:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_a_process_without_descriptors_left_gets_no_queue_and_hears_of_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(os, "pipe", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        PlainQueue()
    gc.collect()
    assert ignored == []


async def test_as_many_instances_wake_as_are_needed() -> None:
    queue = PlainQueue()
    taken: list[Ticket] = []

    def instance() -> None:
        while (batch := queue.take(0)) is not None:
            taken.extend(batch)

    threads = [threading.Thread(target=instance) for _ in range(3)]
    for thread in threads:
        thread.start()
    given: list[Ticket] = []
    for count in (1, 1, 3, 5, 40):
        for _ in range(count):
            given.append(ticket())
            queue.put(given[-1])
        queue.wake(count)
        await until(lambda: len(taken) == len(given))
    assert set(taken) == set(given)
    queue.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, NEVER_S)
        assert not thread.is_alive()
