"""Sequence batching: slots, control tensors, rows of a batch, and what ends a sequence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from support.python_models import answer, ask, fp32, model, queued, until
from tengserve_backend.errors import ConfigurationError, DeadlineExceededError, InvalidRequestError, RequestAbortedError
from tengserve_backend.inference import InferRequest, InferResponse, SequenceFlags
from tengserve_backend.python_backend import PythonModel

# Answers with what all requests of its call were: per request its id, its correlation ID, and its control tensors.
# A request "block" waits until the file "go" is there.
CODE = """
    import json
    import os
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_instance_name"]

        def execute(self, requests):
            if any(request.request_id() == "block" for request in requests):
                while not os.path.exists(pb_utils.get_model_dir() + "/go"):
                    time.sleep(0.001)
            seen = []
            for request in requests:
                controls = {}
                for tensor in request.inputs():
                    if tensor.name() != "IN":
                        value = tensor.as_numpy()
                        assert value.size == 1 and value.ndim == request.inputs()[0].as_numpy().ndim, value
                        value = value.reshape(-1)[0]
                        controls[tensor.name()] = value.decode() if isinstance(value, bytes) else value.item()
                seen.append([request.request_id(), request.correlation_id(), controls])
            made = np.array([json.dumps([self.name, seen]).encode()], np.object_)
            made = made.reshape([1] * requests[0].inputs()[0].as_numpy().ndim)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)]) for request in requests]
"""

CONTROLS = """
    control_input [
        { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
        { name: "END" control [{ kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] }] },
        { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [-1, 0.5] }] },
        { name: "ID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT32 }] }
    ]
"""
LONG_US = 600_000_000
NOBODY = ["", 0, {"START": 0, "END": False, "READY": -1.0, "ID": 0}]


def config(sequences: str, *, size: int = 0, instances: int = 1, idle_us: int = LONG_US) -> str:
    return f"""
        backend: "python"
        max_batch_size: {size}
        input [{{ name: "IN" data_type: TYPE_FP32 dims: [-1] }}]
        output [{{ name: "OUT" data_type: TYPE_STRING dims: [1] }}]
        instance_group [{{ count: {instances} }}]
        sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {sequences} }}
    """


def one(
    key: int | str = 1, flags: str = "", *, request_id: str = "", width: int = 1, rows: int | None = 1, us: int = 0
) -> InferRequest:
    """A request of a sequence; `flags` has "s" for its start and "e" for its end."""
    shape = (width,) if rows is None else (rows, width)
    tensor = fp32("IN", *np.ones(int(np.prod(shape))), shape=shape)
    sequence = SequenceFlags(key, start="s" in flags, end="e" in flags)
    return ask(tensor, request_id=request_id, sequence=sequence, timeout_us=us)


def seen(response: InferResponse) -> tuple[str, list[list[object]]]:
    """The instance that answered, and the requests of its call."""
    instance, requests = json.loads(response.outputs[0].data.reshape(-1)[0])
    return instance, requests


def ids(response: InferResponse) -> list[object]:
    return [request[0] for request in seen(response)[1]]


@asynccontextmanager
async def blocked(folder: Path, m: PythonModel, key: int = 99, *, rows: int | None = 1) -> AsyncIterator[None]:
    """The one instance is busy with a request of a sequence of its own until the end of the block."""
    before = m.statistics().execution_count
    task = asyncio.create_task(answer(m, one(key, "se", request_id="block", rows=rows)))
    await until(lambda: m.statistics().execution_count > before or task.done())
    try:
        yield
    finally:
        (folder / "m" / "1" / "go").touch()
        await task


async def test_flags_and_the_correlation_id_reach_the_model_as_tensors(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config(CONTROLS)) as m:
        assert [spec.name for spec in m.inputs] == ["IN"]
        made = [seen(await answer(m, one(7, flags, rows=None)))[1] for flags in ("s", "", "e", "se")]
    assert made == [
        [["", 7, {"START": start, "END": end, "READY": 0.5, "ID": 7}]]
        for start, end in ((1, False), (0, False), (0, True), (1, True))
    ]


@pytest.mark.parametrize(("data_type", "key"), [("TYPE_STRING", "chat"), ("TYPE_INT64", 2**40), ("TYPE_INT32", 3)])
async def test_the_correlation_id_has_the_type_of_its_tensor(tmp_path: Path, data_type: str, key: int | str) -> None:
    control = f'control_input [{{ name: "ID" control [{{ kind: CONTROL_SEQUENCE_CORRID data_type: {data_type} }}] }}]'
    with model(tmp_path, CODE, config(control)) as m:
        assert seen(await answer(m, one(key, "s", rows=None)))[1] == [["", key, {"ID": key}]]
        wrong = 5 if isinstance(key, str) else "five"
        with pytest.raises(InvalidRequestError, match=r"correlation ID must be a (string|number) for this model"):
            await answer(m, one(wrong, "s", rows=None))
        if data_type == "TYPE_INT32":
            with pytest.raises(InvalidRequestError, match="correlation ID must fit INT32"):
                await answer(m, one(2**31, "s", rows=None))


async def test_a_client_cannot_give_a_control_tensor(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config(CONTROLS)) as m:
        request = ask(fp32("IN", 1), fp32("START", 1), sequence=SequenceFlags(1, start=True))
        with pytest.raises(InvalidRequestError, match="unexpected inference input 'START'"):
            await answer(m, request)


async def test_a_sequence_waits_for_a_slot_until_another_ends(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("")) as m:
        await answer(m, one(1, "s", rows=None))
        # Nothing of the second runs while the first has the only slot, and all of it afterwards, in order.
        second = await queued(m, one(2, "s", request_id="a", rows=None), one(2, "e", request_id="b", rows=None))
        assert ids(await answer(m, one(1, request_id="1", rows=None))) == ["1"]
        assert m.pending() == 2
        assert ids(await answer(m, one(1, "e", request_id="2", rows=None))) == ["2"]
        assert [ids(response) for response in await asyncio.gather(*second)] == [["a"], ["b"]]


async def test_sequences_spread_over_instances_and_stay_there(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("", size=2, instances=2)) as m:
        homes = [seen(await answer(m, one(key, "s")))[0] for key in (1, 2, 3, 4)]
        assert homes[:2] == ["m_0_0", "m_0_1"]
        assert homes[2:] == ["m_0_0", "m_0_1"]
        for key in (4, 2, 1, 3):
            assert seen(await answer(m, one(key)))[0] == homes[key - 1]


async def test_direct_gives_each_sequence_a_row_and_fills_the_empty_ones(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config(CONTROLS, size=4)) as m:
        for key in (1, 2, 3):
            await answer(m, one(key, "s"))
        async with blocked(tmp_path, m):
            tasks = await queued(m, one(3, request_id="third"), one(1, "e", request_id="first"))
        first = seen(await tasks[0])[1]
        assert first == [
            ["first", 1, {"START": 0, "END": True, "READY": 0.5, "ID": 1}],
            NOBODY,
            ["third", 3, {"START": 0, "END": False, "READY": 0.5, "ID": 3}],
        ]
        assert seen(await tasks[1])[1] == first
        statistics = m.statistics()
        # Rows for nobody are part of a call, and no requests.
        assert statistics.inference_count == 6
        # The row that is free again is the first that a new sequence gets.
        assert [request[0] for request in seen(await answer(m, one(4, "s", request_id="new")))[1]] == ["new"]


async def test_requests_of_one_sequence_never_share_a_call(tmp_path: Path) -> None:
    for strategy in ("direct {}", "oldest {}"):
        folder = tmp_path / strategy[:6]
        with model(folder, CODE, config(strategy, size=4)) as m:
            async with blocked(folder, m):
                tasks = await queued(
                    m, one(1, "s", request_id="a"), one(1, request_id="b"), one(1, "e", request_id="c")
                )
            assert [ids(response)[-1] for response in await asyncio.gather(*tasks)] == ["a", "b", "c"]


async def test_another_shape_waits_for_the_next_call(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("direct {}", size=4)) as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, one(1, "se", request_id="a"), one(2, "se", request_id="b", width=2))
        first, second = await asyncio.gather(*tasks)
        assert (ids(first), ids(second)) == (["a", ""], ["", "b"])


async def test_direct_waits_for_other_sequences_up_to_its_delay(tmp_path: Path) -> None:
    waits = f"direct {{ max_queue_delay_microseconds: {LONG_US} minimum_slot_utilization: 0.5 }}"
    with model(tmp_path, CODE, config(waits, size=4)) as m:
        first, second = await queued(m, one(1, "se", request_id="a"), one(2, "se", request_id="b"))
        assert ids(await first) == ids(await second) == ["a", "b"]
    short = "direct { max_queue_delay_microseconds: 1000 minimum_slot_utilization: 1 }"
    with model(tmp_path / "short", CODE, config(short, size=4)) as m:
        assert ids(await answer(m, one(1, "se", request_id="alone"))) == ["alone"]


async def test_oldest_batches_as_requests_come_and_leaves_no_gaps(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("oldest { max_candidate_sequences: 3 }", size=2)) as m:
        async with blocked(tmp_path, m):
            requests = [one(key, "se", request_id=str(key)) for key in (3, 1, 2, 4)]
            tasks = await queued(m, *requests)
        assert [ids(response) for response in await asyncio.gather(*tasks)] == [
            ["3", "1"],
            ["3", "1"],
            ["2", "4"],
            ["2", "4"],
        ]


async def test_oldest_dispatches_a_preferred_size_at_once(tmp_path: Path) -> None:
    waits = f"oldest {{ max_candidate_sequences: 4 preferred_batch_size: [2] max_queue_delay_microseconds: {LONG_US} }}"
    with model(tmp_path, CODE, config(waits, size=4)) as m:
        tasks = await queued(m, one(1, "se", request_id="a"), one(2, "se", request_id="b"))
        assert [ids(response) for response in await asyncio.gather(*tasks)] == [["a", "b"]] * 2


async def test_a_sequence_that_is_idle_for_too_long_gives_its_slot_to_another(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("", idle_us=20_000)) as m:
        await answer(m, one(1, "s", rows=None))
        # Waits for the slot, and gets it without anything being sent.
        await answer(m, one(2, "se", rows=None))
        with pytest.raises(InvalidRequestError, match="sequence 1 to model 'm' must specify the START flag"):
            await answer(m, one(1, rows=None))


@pytest.mark.parametrize(
    "strategy",
    [
        f"direct {{ max_queue_delay_microseconds: {2**64 - 1} minimum_slot_utilization: 1 }}",
        f"oldest {{ max_queue_delay_microseconds: {2**64 - 1} preferred_batch_size: [2] }}",
    ],
)
async def test_times_longer_than_any_clock_are_times(tmp_path: Path, strategy: str) -> None:
    with model(tmp_path, CODE, config(strategy, size=2, idle_us=2**64 - 1)) as m:
        await asyncio.gather(*await queued(m, one(1, "s"), one(2, "s")))
        (waits_for_a_slot,) = await queued(m, one(3, "s"))
        await asyncio.gather(*await queued(m, one(1, "e"), one(2, "e")))
        await asyncio.gather(waits_for_a_slot, *await queued(m, one(4, "s")))


async def test_a_sequence_whose_request_runs_is_not_idle(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("", size=2, idle_us=1000)) as m:
        async with blocked(tmp_path, m):
            task = asyncio.create_task(answer(m, one(1, "s")))
            await until(lambda: m.pending() == 1)
            await asyncio.sleep(0.01)  # Ten times as long as a sequence may be idle.
            other = await queued(m, one(1, "e", request_id="end"))
        await task
        assert "end" in ids(await other[0])


async def test_a_start_continues_a_sequence_that_has_not_ended(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config(CONTROLS, instances=2)) as m:
        home = seen(await answer(m, one(1, "s", rows=None)))[0]
        again, requests = seen(await answer(m, one(1, "s", rows=None)))
        assert again == home
        assert requests[0][2]["START"] == 1


async def test_a_number_and_a_text_are_two_sequences(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("", instances=2)) as m:
        assert seen(await answer(m, one(1, "s", rows=None)))[0] != seen(await answer(m, one("1", "s", rows=None)))[0]


@pytest.mark.parametrize("by", ["the client", "its timeout"])
async def test_a_request_that_goes_before_it_ran_ends_its_sequence(tmp_path: Path, by: str) -> None:
    with model(tmp_path, CODE, config("", size=2)) as m:
        async with blocked(tmp_path, m):
            requests = [one(1, "s", us=1000 if by == "its timeout" else 0), one(1, request_id="next")]
            first = asyncio.create_task(answer(m, requests[0]))
            await until(lambda: m.pending() == 1 or first.done())
            second = asyncio.create_task(answer(m, requests[1]))
            if by == "the client":
                await until(lambda: m.pending() == 2)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                with pytest.raises(RequestAbortedError, match=r"^\[request id: next\] a request of its sequence was"):
                    await second
                assert m.statistics().cancel[0] == 2
            else:
                with pytest.raises(DeadlineExceededError, match="Request timeout expired"):
                    await first
                with pytest.raises((RequestAbortedError, InvalidRequestError)):
                    await second
            with pytest.raises(InvalidRequestError, match="must specify the START flag"):
                await answer(m, one(1))
            assert m.pending() == 0
        # The slot is free again.
        assert ids(await answer(m, one(2, "se", request_id="ok"))) == ["ok"]


async def test_what_is_no_request_of_a_sequence_is_refused_in_triton_s_words(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("", size=2)) as m:
        for request, says in (
            (one(0, "s"), "must specify a non-zero or non-empty correlation ID"),
            (one("", "s"), "must specify a non-zero or non-empty correlation ID"),
            (one("two"), "inference request for sequence two to model 'm' must specify the START flag on the first"),
            (one(1, "s", rows=2), "must specify batch-size 1 due to requirements of sequence batcher"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                await answer(m, request)
        assert m.statistics().fail[0] == 4


async def test_more_than_fits_into_the_queue_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tengserve_backend.python_backend.sequence_queue.MAX_QUEUED_REQUESTS", 2)
    with model(tmp_path, CODE, config("", size=1)) as m:
        async with blocked(tmp_path, m):
            tasks = await queued(m, one(1, "s"), one(1, "e"))
            with pytest.raises(Exception, match="Exceeds maximum queue size"):
                await answer(m, one(2, "s"))
        await asyncio.gather(*tasks)


async def test_an_unload_ends_what_waits(tmp_path: Path) -> None:
    with model(tmp_path, CODE, config("")) as m:
        await answer(m, one(1, "s", rows=None))
        (task,) = await queued(m, one(2, "s", rows=None))
        m.stop()
        with pytest.raises(RequestAbortedError):
            await task


def test_preferred_sizes_of_oldest_are_checked(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"sequence_batching: oldest: preferred_batch_size must be in \[1, max"),
        model(tmp_path, CODE, config("oldest { preferred_batch_size: [9] }", size=2)),
    ):
        pass


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }", "oldest { max_candidate_sequences: 20000 }"])
def test_more_sequences_at_once_than_an_instance_should_have_are_refused(tmp_path: Path, strategy: str) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"(batch_size|sequences) must be .*10000.*, not 20000"),
        model(tmp_path, CODE, config(strategy, size=20_000)),
    ):
        pass
