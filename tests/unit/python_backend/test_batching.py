"""The queue: batches, priorities, timeouts and limits, in Triton's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.python_models import IO, answer, ask, first_output, fp32, model, queued, until
from tengserve_backend.errors import ConfigurationError, DeadlineExceededError, OverloadedError, RequestAbortedError
from tengserve_backend.inference import Cancellation, FailureReason, InferRequest, InferResponse
from tengserve_backend.python_backend import PythonModel

# Answers with how many requests each call had. A request "block" waits until the file "go" is there.
CODE = """
    import os
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.calls = 0

        def execute(self, requests):
            self.calls += 1
            if requests[0].request_id() == "block":
                while not os.path.exists(pb_utils.get_model_dir() + "/go"):
                    time.sleep(0.001)
            responses = []
            for request in requests:
                data = request.inputs()[0].as_numpy()
                made = np.array([[len(requests), self.calls]] * len(data), np.float32)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)]))
            return responses
"""


def config(batching: str, size: int = 8) -> str:
    return IO + f"max_batch_size: {size} dynamic_batching {{ {batching} }}"


def one(*, request_id: str = "", priority: int = 0, timeout_us: int = 0) -> InferRequest:
    tensor = fp32("IN", 1, shape=(1, 1))
    return ask(tensor, request_id=request_id, priority=priority, timeout_us=timeout_us)


@asynccontextmanager
async def blocked(folder: Path, m: PythonModel) -> AsyncIterator[asyncio.Task[InferResponse]]:
    """The one instance is busy until the end of the block."""
    task = asyncio.create_task(answer(m, one(request_id="block")))
    await until(lambda: m.statistics().execution_count > 0 or task.done())
    try:
        yield task
    finally:
        (folder / "m" / "1" / "go").touch()
        await task


async def saw(tasks: list[Awaitable[InferResponse]] | list[asyncio.Task[InferResponse]]) -> list[list[float]]:
    """Per request: how many were in its call, and which call it was."""
    return [response.outputs[0].data[0].tolist() for response in await asyncio.gather(*tasks)]


async def test_waiting_requests_share_a_call(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("")) as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, one(), one(), one())
        assert await saw(tasks) == [[3, 2]] * 3
        assert m.statistics().execution_count == 2
        assert m.statistics().inference_count == 4


async def test_without_dynamic_batching_each_request_runs_alone(tmp_path: Path) -> None:
    with model(tmp_path, CODE, IO + "max_batch_size: 8") as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, one(), one())
        assert await saw(tasks) == [[1, 2], [1, 3]]


async def test_a_batch_is_never_larger_than_the_model_takes(tmp_path: Path) -> None:
    two = ask(fp32("IN", 1, 2, shape=(2, 1)))
    with model(tmp_path, CODE, config("", size=3)) as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, two, one(), two)
        assert await saw(tasks) == [[2, 2], [2, 2], [1, 3]]


async def test_other_shapes_need_another_batch_unless_they_may_be_ragged(tmp_path: Path) -> None:
    wide = ask(fp32("IN", 1, 2, shape=(1, 2)))
    with model(tmp_path / "a", CODE, config("")) as m:
        async with blocked(tmp_path / "a", m):
            tasks = await queued(m, one(), wide, one())
        assert await saw(tasks) == [[1, 2], [1, 3], [1, 4]]
    ragged = config("").replace("dims: [-1] }]", "dims: [-1] allow_ragged_batch: true }]", 1)
    with model(tmp_path / "b", CODE, ragged) as m:
        async with blocked(tmp_path / "b", m):
            tasks = await queued(m, one(), wide, one())
        assert await saw(tasks) == [[3, 2]] * 3


async def test_a_preferred_size_goes_at_once_and_the_rest_after_its_delay(tmp_path: Path) -> None:
    delayed = config("preferred_batch_size: [2] max_queue_delay_microseconds: 600000000")
    with model(tmp_path, CODE, delayed) as m:
        # The delay is longer than the test may take: only the size lets them go.
        assert await saw(await queued(m, one(), one())) == [[2, 1]] * 2
    short = config("preferred_batch_size: [2] max_queue_delay_microseconds: 1000")
    with model(tmp_path / "short", CODE, short) as m:
        assert await saw(await queued(m, one())) == [[1, 1]]


async def test_a_delay_longer_than_any_clock_is_a_delay(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config(f"preferred_batch_size: [2] max_queue_delay_microseconds: {2**64 - 1}")) as m:
        tasks = await queued(m, one(), one())
        assert await saw(tasks) == [[2, 1], [2, 1]]
        assert not m.failure


async def test_a_full_queue_refuses_in_triton_s_words(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("default_queue_policy { max_queue_size: 1 }")) as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, one())
            with pytest.raises(OverloadedError) as caught:
                await answer(m, one(request_id="r"))
        assert caught.value.message == "[request id: r] Exceeds maximum queue size"
        await saw(tasks)
        assert m.statistics().fail[0] == 1
        assert m.statistics().failures[FailureReason.REJECTED] == 1


async def test_a_request_that_waited_too_long_is_rejected_while_the_instance_is_busy(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("default_queue_policy { default_timeout_microseconds: 500000 }")) as m:
        async with blocked(tmp_path, m):
            with pytest.raises(OverloadedError, match=r"^Request timeout expired$"):
                await answer(m, one())
        assert m.statistics().failures[FailureReason.REJECTED] == 1


async def test_a_delayed_request_goes_after_the_others(tmp_path: Path) -> None:
    policy = (
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 600000000 "
        "allow_timeout_override: true }"
    )
    with model(tmp_path, CODE, config(policy, size=1)) as m:
        async with blocked(tmp_path, m) as running:
            tasks = await queued(m, one(timeout_us=1), one())
            await asyncio.sleep(0.01)  # The first one's microsecond passes.
            assert not running.done()
        assert await saw(tasks) == [[1, 3], [1, 2]]


async def test_a_request_cannot_lengthen_the_policy_s_timeout(tmp_path: Path) -> None:
    policy = "default_queue_policy { default_timeout_microseconds: 500000 allow_timeout_override: true }"
    with model(tmp_path, CODE, config(policy)) as m:
        async with blocked(tmp_path, m):
            with pytest.raises(OverloadedError, match="Request timeout expired"):
                await answer(m, one(timeout_us=600_000_000))


async def test_priorities_go_first_and_have_their_own_policies(tmp_path: Path) -> None:
    levels = "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    with model(tmp_path, CODE, config(levels, size=1)) as m:
        async with blocked(tmp_path, m):
            # 0 and a level that is not there are the default.
            tasks = await queued(m, one(), one(priority=9), one(priority=2), one(priority=1))
            with pytest.raises(OverloadedError, match="Exceeds maximum queue size"):
                await answer(m, one(priority=1))
        assert await saw(tasks) == [[1, 3], [1, 4], [1, 5], [1, 2]]


async def test_answers_keep_their_order_when_asked(tmp_path: Path) -> None:
    both = config("preserve_ordering: true", size=1) + " instance_group [{ count: 2 }]"
    with model(tmp_path, CODE, both) as m:
        async with blocked(tmp_path, m):
            second = asyncio.create_task(answer(m, one()))
            await until(lambda: m.statistics().success[0] > 0)  # The other instance has answered it.
            assert not second.done()
        assert await saw([second]) == [[1, 1]]


async def test_a_deadline_does_not_wait_for_its_turn_to_answer(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("preserve_ordering: true", size=1)) as m:
        async with blocked(tmp_path, m):
            with pytest.raises(DeadlineExceededError):
                await answer(m, one(timeout_us=1000))
        assert m.statistics().failures[FailureReason.REJECTED] == 1  # It waited in the queue all the time.


async def test_a_client_that_leaves_the_queue_is_not_served(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("")) as m:
        async with blocked(tmp_path, m):
            (task,) = await queued(m, one())
            assert m.statistics().pending == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert m.statistics().pending == m.pending() == 0
        assert m.statistics().cancel[0] == 1
        assert m.statistics().execution_count == 1


async def test_a_waiting_request_whose_maker_asks_for_its_end_is_not_served(tmp_path: Path) -> None:
    cancellation = Cancellation()
    with model(tmp_path, CODE, config("")) as m:
        async with blocked(tmp_path, m):
            (task,) = await queued(m, replace(one(), cancellation=cancellation))
            cancellation.ask()
            with pytest.raises(RequestAbortedError):
                await task
            assert m.pending() == 0
        assert m.statistics().cancel[0] == 1
        assert m.statistics().execution_count == 1


async def test_a_call_that_hangs_is_bounded_by_the_request_s_timeout(tmp_path: Path) -> None:
    with model(tmp_path, CODE, IO + "max_batch_size: 1") as m:
        with pytest.raises(DeadlineExceededError):
            await answer(m, one(request_id="block", timeout_us=10_000))
        assert m.statistics().failures[FailureReason.OTHER] == 1
        (tmp_path / "m" / "1" / "go").touch()
        assert await first_output(m, one()) == [[1, 2]]


@pytest.mark.parametrize(
    ("batching", "says"),
    [
        ("preferred_batch_size: [9]", r"preferred_batch_size must be in \[1, max_batch_size \(8\)\]"),
        ("priority_levels: 2", r"default_priority_level must be in \[1, priority_levels \(2\)\], not 0"),
        ("priority_queue_policy { key: 3 value {} }", "has a policy for no level, 3"),
    ],
)
def test_wrong_batching_is_refused(tmp_path: Path, batching: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says), model(tmp_path, CODE, config(batching)):
        pass
