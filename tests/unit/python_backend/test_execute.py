"""What `execute` may return and raise, and what its client gets."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from support.python_models import DECOUPLED, IO, answer, answers, ask, first_output, fp32, model, until
from tengserve_backend.errors import ErrorCode, ModelExecutionError, RequestAbortedError, ShuttingDownError
from tengserve_backend.python_backend import model as model_module
from tengserve_backend.python_backend import ticket

DOUBLE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                data = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                data *= 2
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)], parameters={"k": 1}))
            return responses
"""


def executing(body: str) -> str:
    """A model whose `execute` is these lines."""
    lines = "\n".join("            " + line for line in body.splitlines())
    return (
        "import triton_python_backend_utils as pb_utils\n"
        "import asyncio, threading, time\n"
        "class TritonPythonModel:\n"
        "        def response(self, *values):\n"
        "            import numpy as np\n"
        "            array = np.array(values, np.float32)\n"
        "            return pb_utils.InferenceResponse([pb_utils.Tensor('OUT', array)])\n"
        "        def execute(self, requests):\n" + lines
    )


async def test_a_model_answers_and_may_change_its_input(tmp_path: Path) -> None:
    data = np.array([1, 2], np.float32)
    data.flags.writeable = False
    with model(tmp_path, DOUBLE) as m:
        response = await answer(m, ask(request_id="7"))
    assert response.outputs[0].data.tolist() == [2.0, 4.0]
    assert (response.model, response.version, response.request_id, response.final) == ("m", "1", "7", True)
    assert response.parameters == {"k": 1}
    assert data.tolist() == [1, 2]


async def test_initialize_gets_triton_s_arguments(tmp_path: Path) -> None:
    code = """
        import json
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.args = dict(args, model_config=json.loads(args["model_config"]), dir=pb_utils.get_model_dir())

            def execute(self, requests):
                text = np.array([json.dumps(self.args).encode()], np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]) for _ in requests]
    """
    with model(tmp_path, code, IO + "max_batch_size: 0 instance_group [{ kind: KIND_MODEL }]") as m:
        (said,) = await first_output(m)
    args = json.loads(said)
    config = args.pop("model_config")
    assert config["input"][0]["dims"] == [-1]
    assert args == {
        "model_instance_kind": "MODEL",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
        "dir": str(tmp_path / "m" / "1"),
    }


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("raise pb_utils.TritonModelException('on purpose')", "TritonModelException: on purpose"),
        ("raise ValueError('in /etc/secrets/x.txt')", "ValueError: in ..."),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("return None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("return (1,)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "return []",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
        ),
        (
            "return [3]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
    ],
)
async def test_what_execute_does_wrong_fails_its_requests_only(tmp_path: Path, body: str, says: str) -> None:
    with model(tmp_path, executing(f"if requests[0].request_id() == 'good': return [self.response(1)]\n{body}")) as m:
        with pytest.raises(ModelExecutionError) as caught:
            await answer(m, ask())
        assert caught.value.message == (f"Failed to process the request(s) for model instance 'm_0_0', message: {says}")
        assert caught.value.code is ErrorCode.INTERNAL
        assert await first_output(m, ask(request_id="good")) == [1.0]
        assert m.statistics().fail[0] == 1
        assert m.statistics().success[0] == 1


async def test_an_error_response_carries_its_code(tmp_path: Path) -> None:
    body = (
        "error = pb_utils.TritonError('not that', pb_utils.TritonError.NOT_FOUND)\n"
        "return [pb_utils.InferenceResponse(error=error)]"
    )
    with model(tmp_path, executing(body)) as m, pytest.raises(ModelExecutionError) as caught:
        await answer(m, ask())
    assert (caught.value.message, caught.value.code) == ("not that", ErrorCode.NOT_FOUND)


async def test_only_requested_outputs_are_sent(tmp_path: Path) -> None:
    config = IO.replace("output [", 'output [{ name: "B" data_type: TYPE_FP32 dims: [-1] }, ')
    body = (
        "import numpy as np\nmade = [pb_utils.Tensor(n, np.zeros(1, np.float32)) for n in ('OUT', 'B')]\n"
        "return [pb_utils.InferenceResponse(made)]"
    )
    with model(tmp_path, executing(body), config) as m:
        assert [tensor.name for tensor in (await answer(m, ask())).outputs] == ["OUT", "B"]
        assert [tensor.name for tensor in (await answer(m, ask(outputs=("B",)))).outputs] == ["B"]


async def test_the_request_says_what_was_asked(tmp_path: Path) -> None:
    body = (
        "import json, numpy as np\nr = requests[0]\n"
        "said = [r.request_id(), r.parameters(), r.timeout(), r.requested_output_names(), r.correlation_id(),"
        " r.flags(), r.is_cancelled(), isinstance(r, pb_utils.InferenceRequest)]\n"
        "text = np.array([json.dumps(said).encode()], np.object_)\n"
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', text)])]"
    )
    with model(tmp_path, executing(body)) as m:
        request = ask(request_id="x", parameters={"a": 1.5, "b": True}, timeout_us=60_000_000)
        (said,) = await first_output(m, request)
    assert json.loads(said) == ["x", '{"a": 1.5, "b": true}', 60_000_000, ["OUT"], 0, 0, False, True]


async def test_a_default_model_may_use_the_sender_from_a_thread(tmp_path: Path) -> None:
    body = (
        "sender = requests[0].get_response_sender()\n"
        "def later():\n"
        "    sender.send(self.response(5), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
        "threading.Thread(target=later).start()"
    )
    with model(tmp_path, executing(body)) as m:
        assert await first_output(m) == [5.0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("sender.send(flags=2)", "Unable to send response. Unsupported flag provided."),
        (
            "sender.send()",
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        (
            "sender.send(flags=1)",
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
        ),
        (
            "sender.send(self.response(1))\nsender.send(self.response(1))",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
    ],
)
async def test_the_sender_s_rules_in_the_default_mode(tmp_path: Path, lines: str, says: str) -> None:
    indented = "\n".join("    " + line for line in lines.splitlines())
    body = (
        f"sender = requests[0].get_response_sender()\ntry:\n{indented}\n"
        "except pb_utils.TritonModelException as error:\n    self.seen = str(error)\n"
        "if requests[0].request_id():\n    raise ValueError(self.seen)\n"
        "if not sender.closed():\n    sender.send(self.response(1), 1)"
    )
    with model(tmp_path, executing(body)) as m:
        await answer(m, ask())
        if "more than one" not in says:
            with pytest.raises(ModelExecutionError, match=re.escape(says)):
                await answer(m, ask(request_id="tell"))


async def test_a_decoupled_model_sends_any_number_of_responses(tmp_path: Path) -> None:
    body = (
        "for request in requests:\n"
        "    sender = request.get_response_sender()\n"
        "    for value in request.inputs()[0].as_numpy():\n"
        "        sender.send(self.response(value))\n"
        "    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
    )
    with model(tmp_path, executing(body), DECOUPLED) as m:
        got = await answers(m, ask(fp32("IN", 1, 2, 3)))
    assert [[tensor.data.tolist() for tensor in response.outputs] for response in got] == [[[1]], [[2]], [[3]], []]
    assert [response.final for response in got] == [False, False, False, True]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("return [self.response(1)]", "is using the decoupled mode and the execute function must return None."),
        (
            "sender.send(flags=1)\nsender.send(self.response(1))",
            "Unable to send response. Response sender has been closed.",
        ),
    ],
)
async def test_the_rules_of_the_decoupled_mode(tmp_path: Path, lines: str, says: str) -> None:
    body = f"sender = requests[0].get_response_sender()\n{lines}"
    with model(tmp_path, executing(body), DECOUPLED) as m:
        if "closed" in says:
            assert [response.final for response in await answers(m, ask())] == [True]
        else:
            with pytest.raises(ModelExecutionError, match=re.escape(says)):
                await answers(m, ask())


async def test_a_request_that_is_forgotten_ends(tmp_path: Path) -> None:
    with model(tmp_path, executing("pass"), DECOUPLED) as m:
        (only,) = await answers(m, ask())
    assert only.final
    assert only.outputs == ()


async def test_asynchronous_executions_of_a_decoupled_model_overlap(tmp_path: Path) -> None:
    code = """
        import asyncio
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.met = None

            async def execute(self, requests):
                self.met = self.met or asyncio.Barrier(2)
                # Passes only when two executions are there at the same time.
                await self.met.wait()
                requests[0].get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    with model(tmp_path, code, DECOUPLED) as m:
        both = await asyncio.gather(answers(m, ask()), answers(m, ask()))
    assert [len(got) for got in both] == [1, 1]


async def test_an_asynchronous_execute_works_in_the_default_mode_and_may_fail(tmp_path: Path) -> None:
    code = executing(
        "await asyncio.sleep(0)\nif requests[0].request_id():\n    raise KeyError('k')\nreturn [self.response(3)]"
    )
    with model(tmp_path, code.replace("def execute", "async def execute")) as m:
        assert await first_output(m) == [3.0]
        with pytest.raises(ModelExecutionError, match="KeyError: 'k'"):
            await answer(m, ask(request_id="x"))


async def test_closing_the_iterator_tells_the_model(tmp_path: Path) -> None:
    body = (
        "sender = requests[0].get_response_sender()\n"
        "sender.send(self.response(1))\n"
        "while not sender.is_cancelled():\n    time.sleep(0.001)\n"
        "error = pb_utils.TritonError('left', pb_utils.TritonError.CANCELLED)\n"
        "sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
    )
    with model(tmp_path, executing(body), DECOUPLED) as m:
        responses = m.infer(ask())
        await anext(aiter(responses))
        await responses.aclose()
        await until(lambda: m.statistics().cancel[0] == 1)


async def test_stop_ends_what_runs(tmp_path: Path) -> None:
    body = "while not requests[0].is_cancelled():\n    time.sleep(0.001)\nreturn [self.response(1)]"
    with model(tmp_path, executing(body)) as m:
        running = asyncio.create_task(answer(m, ask()))
        await until(lambda: m.statistics().execution_count > 0)
        await asyncio.to_thread(m.stop)
        with pytest.raises(RequestAbortedError):
            await running
        with pytest.raises(ShuttingDownError):
            await answer(m, ask())
        assert not await m.is_ready()


async def test_drain_waits_for_what_runs_and_finalize_is_called(tmp_path: Path) -> None:
    code = executing(
        "open(pb_utils.get_model_dir() + '/started', 'w').close()\n"
        "while not __import__('os').path.exists(pb_utils.get_model_dir() + '/go'):\n    time.sleep(0.001)\n"
        "return [self.response(1)]"
    )
    code += "\n        def finalize(self):\n            open(pb_utils.get_model_dir() + '/finalized', 'w').close()\n"
    folder = tmp_path / "m" / "1"
    with model(tmp_path, code) as m:
        running = asyncio.create_task(answer(m, ask()))
        await until((folder / "started").exists)
        assert not await m.drain(0.01)
        (folder / "go").touch()
        assert await m.drain(30)
        assert (await running).final
    assert (folder / "finalized").exists()


SENDS_MUCH = """
    import asyncio
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        {define} execute(self, requests):
            sender = requests[0].get_response_sender()
            for value in range(20):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_a_model_waits_for_a_client_that_reads_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket, "MAX_UNREAD_RESPONSES", 2)
    with model(tmp_path, SENDS_MUCH.format(define="def"), DECOUPLED) as m:
        got = await answers(m, ask())
    assert [response.outputs[0].data[0] for response in got[:-1]] == list(range(20))


async def test_an_asynchronous_model_ends_what_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket, "MAX_UNREAD_RESPONSES", 0)
    with model(tmp_path, SENDS_MUCH.format(define="async def"), DECOUPLED) as m:
        with pytest.raises(RequestAbortedError, match="too slowly"):
            await answers(m, ask())
        assert await m.drain(30)


async def test_a_call_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_module, "STOP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(model_module, "ABANDON_TIMEOUT_S", 0.01)
    code = executing(
        "while not __import__('os').path.exists(pb_utils.get_model_dir() + '/go'):\n    time.sleep(0.001)\n"
        "return [self.response(1)]"
    )
    with model(tmp_path, code) as m:
        running = asyncio.create_task(answer(m, ask()))
        await until(lambda: m.statistics().execution_count > 0)
        await asyncio.to_thread(m.stop)
        with pytest.raises(RequestAbortedError):
            await running
    assert "model m_0_0 hangs in its own code" in caplog.text
    (tmp_path / "m" / "1" / "go").touch()
    await until(lambda: all(thread.name != "model m_0_0" for thread in threading.enumerate()))
