"""Models that misbehave in ways that reach beyond one call: nobody waits for ever, and nobody else pays."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from support.python_models import DECOUPLED, IO, answer, answers, ask, first_output, fp32, model, until
from tengserve_backend.errors import DeadlineExceededError, ErrorCode, ModelExecutionError, ModelNotReadyError
from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.python_backend import ticket
from tengserve_backend.python_backend.instance import Instance
from tengserve_backend.repository.entries import Entry, ModelState, Serving
from tengserve_backend.repository.scan import scan_repository

TWO = IO + "instance_group [{ count: 2 }]\n"
ANY = 'backend: "python" input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]\n'


def executing(body: str, define: str = "def") -> str:
    """A model whose `execute` is these lines; `here` is its folder, with which test and model talk."""
    lines = "\n".join("        " + line for line in body.splitlines())
    return (
        "import asyncio, pathlib, sys, time\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n"
        "here = pathlib.Path(pb_utils.get_model_dir())\n"
        "FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL\n"
        "def one(array=np.zeros(1, np.float32), name='OUT', **fields):\n"
        "    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)], **fields)\n"
        "class TritonPythonModel:\n"
        f"    {define} execute(self, requests):\n{lines}"
    )


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("one(name='a\\ud800')", r"the name of the output 'a\ud800' is no text"),
        ("one(parameters={'a\\ud800': 1})", r"the name of the parameter 'a\ud800' is no text"),
        ("one(parameters={'k': '\\udfff'})", "parameter 'k' is no text"),
        ("one(parameters={'k': 2**64})", "parameter 'k' must fit 64 bits, and takes 65"),
        ("one(parameters={'k': -2**63 - 1})", "parameter 'k' must fit 64 bits, and takes 64"),
        ("one(parameters={'k': 10**5000})", "parameter 'k' must fit 64 bits, and takes 16610"),
    ],
)
@pytest.mark.parametrize("config", [ANY, ANY + "model_transaction_policy { decoupled: true }"])
async def test_an_answer_that_no_protocol_carries_is_the_model_s_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: str, says: str, config: str
) -> None:
    body = f"response = {made}\nreturn [response]"
    if "decoupled" in config:
        body = f"sender = requests[0].get_response_sender()\nsender.send({made})\nsender.send(flags=FINAL)"
    with model(tmp_path, executing(body), config) as m:
        with pytest.raises(ModelExecutionError) as caught:
            await answers(m, ask())
        assert m.statistics().fail[0] == 1
    assert caught.value.message == f"The answer of model 'm' cannot be sent: {says}."
    assert caught.value.code is ErrorCode.INTERNAL
    assert says in caplog.text


async def test_numbers_at_the_ends_of_64_bits_are_sent(tmp_path: Path) -> None:
    with model(tmp_path, executing("return [one(parameters={'a': 2**64 - 1, 'b': -2**63, 'c': True})]")) as m:
        assert (await answer(m, ask())).parameters == {"a": 2**64 - 1, "b": -(2**63), "c": True}


async def test_an_output_that_the_configuration_does_not_have(tmp_path: Path) -> None:
    with model(tmp_path, executing("return [one(name='X')]")) as m, pytest.raises(ModelExecutionError) as caught:
        await answer(m, ask())
    assert caught.value.message == "unexpected inference output 'X' for model 'm'"
    assert caught.value.code is ErrorCode.INVALID_ARG


async def test_outputs_of_one_name_all_come_as_in_triton(tmp_path: Path) -> None:
    body = (
        "made = [pb_utils.Tensor('OUT', np.array([value], np.float32)) for value in (1, 2)]\n"
        "return [pb_utils.InferenceResponse(made)]"
    )
    with model(tmp_path, executing(body)) as m:
        response = await answer(m, ask())
    assert [(tensor.name, tensor.data.tolist()) for tensor in response.outputs] == [("OUT", [1.0]), ("OUT", [2.0])]


@pytest.mark.parametrize("element", ["object()", "[object()]", "len", "lambda: 0", "sys.stdout.write"])
async def test_an_element_without_a_text_is_refused_and_no_address_told(tmp_path: Path, element: str) -> None:
    body = f"array = np.empty(1, np.object_)\narray[0] = {element}\nreturn [one(array)]"
    with model(tmp_path, executing(body)) as m:
        if element == "len":
            assert await first_output(m) == [b"<built-in function len>"]
            return
        with pytest.raises(ModelExecutionError, match=r"has an element of type .*neither bytes nor") as e:
            await answer(m, ask())
    assert "0x" not in e.value.message


async def test_elements_with_a_text_are_sent_as_triton_sends_them(tmp_path: Path) -> None:
    body = "return [one(np.array([b'a', 'b at 0x1>', 3, 0.5, None, True, {'k': 1}], np.object_))]"
    with model(tmp_path, executing(body)) as m:
        assert await first_output(m) == [b"a", b"b at 0x1>", b"3", b"0.5", b"None", b"True", b"{'k': 1}"]


async def test_who_sends_on_to_nobody_is_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed = threading.Event()
    monkeypatch.setattr(ticket.time, "sleep", lambda seconds: slowed.set())
    body = "sender = requests[0].get_response_sender()\nwhile not (here / 'go').exists():\n    sender.send(one())"
    with model(tmp_path, executing(body), DECOUPLED) as m:
        responses = m.infer(ask())
        await anext(aiter(responses))
        assert not slowed.is_set()
        await responses.aclose()
        await until(slowed.is_set)
        (tmp_path / "m" / "1" / "go").touch()
        assert await m.drain(30)


async def test_who_sends_on_to_nobody_from_an_event_loop_is_ended(tmp_path: Path) -> None:
    body = (
        "sender = requests[0].get_response_sender()\n"
        "try:\n"
        "    while True:\n"
        "        sender.send(one())\n"
        "        await asyncio.sleep(0)\n"
        "finally:\n"
        "    (here / 'ended').touch()"
    )
    with model(tmp_path, executing(body, "async def"), DECOUPLED) as m:
        responses = m.infer(ask())
        await anext(aiter(responses))
        await responses.aclose()
        await until((tmp_path / "m" / "1" / "ended").exists)
        await until(lambda: m.statistics().cancel[0] == 1)


async def test_texts_that_nobody_reads_are_bounded_by_their_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket, "MAX_UNREAD_BYTES", 1000)
    body = (
        "sender = requests[0].get_response_sender()\n"
        "for number in range(100):\n"
        "    (here / 'sent').write_text(str(number))\n"
        "    sender.send(one(np.array([b'x' * 600], np.object_)))\n"
        "(here / 'all').touch()\n"
        "sender.send(flags=FINAL)"
    )
    folder = tmp_path / "m" / "1"
    with model(tmp_path, executing(body), DECOUPLED) as m:
        responses = m.infer(ask())
        await anext(aiter(responses))
        await until(lambda: (folder / "sent").read_text() == "3")
        assert not (folder / "all").exists()
        assert len([response async for response in responses]) == 100


@pytest.mark.parametrize("config", [IO, DECOUPLED])
async def test_an_asynchronous_model_that_wants_to_end_the_process_fails_its_request(
    tmp_path: Path, config: str
) -> None:
    body = "if not requests[0].request_id():\n    sys.exit(3)\n"
    body += "requests[0].get_response_sender().send(one(), FINAL)" if config == DECOUPLED else "return [one()]"
    with model(tmp_path, executing(body, "async def"), config) as m:
        for _ in range(2):
            with pytest.raises(ModelExecutionError, match="message: SystemExit: 3"):
                await answers(m, ask())
            assert len(await answers(m, ask(request_id="good"))) == 1


async def test_an_exception_that_ends_the_process_when_it_is_shown_fails_its_request(tmp_path: Path) -> None:
    code = executing("if requests[0].request_id():\n    return [one()]\nraise Evil()").replace(
        "class TritonPythonModel",
        "class Evil(Exception):\n    def __str__(self):\n        raise SystemExit(1)\nclass TritonPythonModel",
    )
    with model(tmp_path, code) as m:
        with pytest.raises(ModelExecutionError, match="message: Evil: Evil"):
            await answer(m, ask())
        assert (await answer(m, ask(request_id="good"))).final


async def test_an_instance_that_dies_takes_its_model_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the server itself does not foresee: here, an error in its own code."""
    dies = threading.Event()
    execute = Instance._execute

    def failing(instance: Instance, batch: list[ticket.Ticket]) -> None:
        if batch[0].request.request_id == "dies":
            assert dies.wait(30)
            raise MemoryError("no room")
        execute(instance, batch)

    monkeypatch.setattr(Instance, "_execute", failing)
    body = "(here / 'began').touch()\nwhile not (here / 'go').exists():\n    time.sleep(0.001)\nreturn [one()]"
    folder = tmp_path / "m" / "1"
    with model(tmp_path, executing(body), TWO) as m:
        tasks = [asyncio.create_task(answer(m, ask(request_id=name))) for name in ("dies", "lives", "waits")]
        await until(lambda: (folder / "began").exists() and m.pending() == 1)
        dies.set()
        for task, error in ((tasks[0], ModelExecutionError), (tasks[2], ModelNotReadyError)):
            with pytest.raises(error, match=r"Instance 'm_0_.' of the model has died; the server's log says why"):
                await task
        for call in (answer(m, ask()), m.is_ready()):
            with pytest.raises(ModelNotReadyError, match="has died"):
                await call
        (source,) = scan_repository(tmp_path)
        status = Entry(source, Serving(source, m)).status()
        assert status.state is ModelState.UNAVAILABLE
        assert "has died" in status.reason
        # What runs elsewhere comes to its end.
        (folder / "go").touch()
        assert (await tasks[1]).final
        assert await m.drain(30)
    assert "MemoryError: no room" in caplog.text


async def test_an_answer_that_does_not_come_in_the_operator_s_time(tmp_path: Path) -> None:
    body = "while not requests[0].is_cancelled():\n    time.sleep(0.001)\n(here / 'told').touch()\nreturn [one()]"
    with model(tmp_path, executing(body), request_timeout_s=0.05) as m:
        with pytest.raises(DeadlineExceededError, match="Request timeout expired"):
            await answer(m, ask())
        await until((tmp_path / "m" / "1" / "told").exists)
        assert m.statistics().fail[0] == 1


async def test_the_log_of_a_crash_names_the_requests_of_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = (
        IO + "max_batch_size: 20 dynamic_batching { preferred_batch_size: [20] max_queue_delay_microseconds: 60000000 }"
    )
    ids = ["", "first\nof all", *(f"id{number}" for number in range(18))]
    with model(tmp_path, executing("raise ValueError('broken')"), config) as m:
        asked = [answer(m, ask(fp32("IN", 1, shape=(1, 1)), request_id=request_id)) for request_id in ids]
        failures = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(failure, ModelExecutionError) and "id1" not in failure.message for failure in failures)
    (line,) = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert line.endswith(f"(requests without an id, first\\nof all, {', '.join(ids[2:16])} and 4 more)")


async def test_a_request_that_ends_while_its_batch_runs_is_not_the_others_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = (
        IO + "max_batch_size: 2 dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 60000000 }"
    )
    body = (
        "while not requests[0].is_cancelled():\n    time.sleep(0.001)\n"
        "return [one(np.zeros((1, 1), np.float32)) for _ in requests]"
    )
    tensor = fp32("IN", 1, shape=(1, 1))
    with model(tmp_path, executing(body), config) as m:
        late, good = (asyncio.create_task(answer(m, ask(tensor, timeout_us=us))) for us in (500_000, 0))
        with pytest.raises(DeadlineExceededError):
            await late
        assert (await good).outputs[0].data.tolist() == [[0.0]]
    assert "Failed to process" not in caplog.text


async def test_the_operator_s_time_is_for_each_response(tmp_path: Path) -> None:
    """A stream may take longer than one response: here the second waits until the first was read."""
    body = (
        "sender = requests[0].get_response_sender()\n"
        "sender.send(one())\n"
        "while not (here / 'read').exists():\n    time.sleep(0.001)\n"
        "sender.send(one(), FINAL)"
    )
    with model(tmp_path, executing(body), DECOUPLED, request_timeout_s=30) as m:
        got = 0
        async for _ in m.infer(ask()):
            got += 1
            (tmp_path / "m" / "1" / "read").touch()
    assert got == 2


async def test_requests_that_were_given_up_are_not_waited_for(tmp_path: Path) -> None:
    body = "while not (here / 'go').exists():\n    time.sleep(0.001)\nreturn [one()]"
    with model(tmp_path, executing(body)) as m:
        task = asyncio.create_task(answer(m, ask()))
        await until(lambda: m.statistics().execution_count == 1)
        assert m.unanswered() == 1
        assert not await m.drain(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert m.unanswered() == 0
        assert await m.drain(30)
        (tmp_path / "m" / "1" / "go").touch()


def test_the_size_of_texts_is_that_of_the_texts() -> None:
    texts = np.array([b"x" * 100, b""], np.object_)
    assert InferTensor("T", Datatype.BYTES, texts).size_bytes == 116
    assert InferTensor("T", Datatype.INT32, np.zeros(3, np.int32)).size_bytes == 12
