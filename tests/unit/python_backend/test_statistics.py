"""What a python model's statistics say of its calls and of its responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.python_models import DECOUPLED, IO, answer, answers, ask, fp32, model, until
from tengserve_backend.errors import ModelExecutionError
from tengserve_backend.inference import FailureReason, ModelStatistics
from tengserve_backend.python_backend.counters import MAX_COUNTED_RESPONSES

ECHO = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].request_id() == "fail":
                raise ValueError("no")
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
                for request in requests
            ]
"""

# Sends as many responses as the first element says, an error when the second is 1, and a final flag apart.
REPEAT = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender, data = request.get_response_sender(), request.inputs()[0].as_numpy()
                for _ in range(int(data[0])):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)]))
                if data[1]:
                    error = pb_utils.TritonError("no")
                    sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def ends(statistics: ModelStatistics) -> list[tuple[int, int, int, int]]:
    """Of each place: how many responses had outputs, failed, were empty, were for nobody."""
    return [(one.success[0], one.fail[0], one.empty_response[0], one.cancel[0]) for one in statistics.responses]


async def test_calls_are_counted_by_their_batch_size(tmp_path: Path) -> None:
    with model(tmp_path, ECHO, IO + "max_batch_size: 8") as m:
        for rows in (3, 1, 3):
            await answer(m, ask(fp32("IN", *range(rows), shape=(rows, 1))))
        with pytest.raises(ModelExecutionError):
            await answer(m, ask(fp32("IN", 1, 2, shape=(2, 1)), request_id="fail"))
        statistics = m.statistics()
    assert [(batch.batch_size, batch.count) for batch in statistics.batches] == [(1, 1), (2, 1), (3, 2)]
    assert all(batch.compute_infer_ns > 0 and batch.compute_input_ns > 0 for batch in statistics.batches)
    assert sum(batch.count for batch in statistics.batches) == statistics.execution_count
    assert statistics.inference_count == 7
    assert statistics.failures == {FailureReason.REJECTED: 0, FailureReason.BACKEND: 1, FailureReason.OTHER: 0}
    assert statistics.responses == ()


async def test_a_model_without_a_batch_dimension_counts_requests(tmp_path: Path) -> None:
    with model(tmp_path, ECHO) as m:
        await answer(m, ask())
        assert [(batch.batch_size, batch.count) for batch in m.statistics().batches] == [(1, 1)]


async def test_responses_of_a_decoupled_model_are_counted_by_their_place(tmp_path: Path) -> None:
    with model(tmp_path, REPEAT, DECOUPLED) as m:
        assert m.statistics().responses == ()
        await answers(m, ask(fp32("IN", 2, 0)))
        await answers(m, ask(fp32("IN", 0, 0)))
        with pytest.raises(ModelExecutionError):
            await answers(m, ask(fp32("IN", 1, 1)))
        statistics = m.statistics()
    assert ends(statistics) == [(2, 0, 1, 0), (1, 1, 0, 0), (0, 0, 1, 0)]
    first, second, third = statistics.responses
    assert (first.compute_infer[0], first.compute_output[0]) == (3, 2)
    assert (second.compute_infer[0], second.compute_output[0]) == (2, 1)
    assert (third.compute_infer[0], third.compute_output) == (1, (0, 0))
    assert first.success[1] >= first.compute_output[1] > 0


async def test_a_response_that_nobody_waits_for_is_counted_as_such(tmp_path: Path) -> None:
    code = """
        import time
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())]))
                while not sender.is_cancelled():
                    time.sleep(0.001)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    with model(tmp_path, code, DECOUPLED) as m:
        responses = m.infer(ask())
        await anext(responses)
        await responses.aclose()
        await until(lambda: m.statistics().cancel[0] == 1)
        assert ends(m.statistics()) == [(1, 0, 0, 0), (0, 0, 0, 1)]


async def test_places_beyond_the_bound_are_not_counted_apart(tmp_path: Path) -> None:
    with model(tmp_path, REPEAT, DECOUPLED) as m:
        assert len(await answers(m, ask(fp32("IN", MAX_COUNTED_RESPONSES + 5, 0)))) == MAX_COUNTED_RESPONSES + 6
        assert len(m.statistics().responses) == MAX_COUNTED_RESPONSES
