"""Models that ask other models of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.python_models import DECOUPLED, Peers, first_output, loaded, write_model
from tengserve_backend.python_backend import PythonModel

SQUARE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                data = request.inputs()[0].as_numpy()
                data *= data
                if request.request_id() == "fail":
                    raise ValueError("cannot")
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)]))
            return responses
"""
REPEAT = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for value in request.inputs()[0].as_numpy():
                    if sender.is_cancelled():
                        break
                    made = pb_utils.Tensor("OUT", np.array([value], np.float32))
                    sender.send(pb_utils.InferenceResponse([made]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Says 1 until it is cancelled, then 0.
UNTIL = """
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                while not request.is_cancelled():
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]))
                    time.sleep(0.001)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]))
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
    import asyncio
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def call(self, name, **options):
            tensor = pb_utils.Tensor("IN", np.array([2, 3], np.float32))
            return pb_utils.InferenceRequest(
                model_name=name, requested_output_names=["OUT"], inputs=[tensor], **options)

        def answer(self, values):
            made = np.array([str(value).encode() for value in values], np.object_)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)])]

        {define} execute(self, requests):
{body}
"""


def calling(root: Path, body: str, *, define: str = "def") -> None:
    lines = "\n".join("            " + line for line in body.splitlines())
    write_model(root, "m", CALLER.replace("{define}", define).replace("{body}", lines))
    write_model(root, "square", SQUARE)
    write_model(root, "repeat", REPEAT, DECOUPLED)


async def said(models: dict[str, PythonModel]) -> list[str]:
    return [element.decode() for element in await first_output(models["m"])]


async def test_a_model_asks_another(tmp_path: Path) -> None:
    calling(
        tmp_path,
        "request = self.call('square')\n"
        "outputs = [request.exec().output_tensors()[0].as_numpy().tolist() for _ in range(2)]\n"
        "return self.answer([outputs[0], outputs[1], request.inputs()[0].as_numpy().tolist()])",
    )
    with loaded(tmp_path) as models:
        # What is asked is a copy: the other model may change it.
        assert await said(models) == ["[4.0, 9.0]", "[4.0, 9.0]", "[2.0, 3.0]"]


async def test_asynchronous_requests_run_side_by_side_on_any_thread(tmp_path: Path) -> None:
    calling(
        tmp_path,
        "calls = [self.call('square').async_exec() for _ in range(3)]\n"
        "first = await asyncio.gather(*calls)\n"
        "second = await asyncio.to_thread(self.call('square').exec)\n"
        "both = [*first, second]\n"
        "return self.answer([r.output_tensors()[0].as_numpy().tolist() for r in both])",
        define="async def",
    )
    with loaded(tmp_path) as models:
        assert await said(models) == ["[4.0, 9.0]"] * 4


async def test_waiting_for_a_decoupled_model_s_first_response_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    # The other model answers the first only when it has the second too.
    write_model(
        tmp_path,
        "both",
        """
        import threading
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.barrier = threading.Barrier(2)

            def execute(self, requests):
                for request in requests:
                    sending = (request.get_response_sender(), request.inputs()[0])
                    threading.Thread(target=self.send, args=sending).start()

            def send(self, sender, tensor):
                self.barrier.wait(30)
                for _ in range(2):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        DECOUPLED,
    )
    calling(
        tmp_path,
        "async def read():\n"
        "    responses = await self.call('both').async_exec(decoupled=True)\n"
        "    return [len(response.output_tensors()) for response in responses]\n"
        "return self.answer(await asyncio.gather(read(), read()))",
        define="async def",
    )
    with loaded(tmp_path) as models:
        assert await said(models) == ["[1, 1, 0]"] * 2


async def test_a_decoupled_model_is_read_as_it_answers(tmp_path: Path) -> None:
    calling(
        tmp_path,
        "asked = self.call('repeat')\n"
        "got = [[t.as_numpy().tolist() for t in r.output_tensors()] for r in asked.exec(decoupled=True)]\n"
        "again = self.call('repeat').exec(decoupled=True)\n"
        "next(again)\ncounts = [len(list(again)) for _ in range(3)]\n"
        "return self.answer([got, counts])",
    )
    with loaded(tmp_path) as models:
        assert await said(models) == ["[[[2.0]], [[3.0]], []]", "[2, 3, 3]"]
        assert await models["repeat"].drain(30)


READ = """
said = []
for response in responses:
    said.append(response.error().code().name if response.has_error() else response.output_tensors()[0].as_numpy()[0])
    if len(said) == 2:
        responses.cancel()
return self.answer([said[0], said[1], *said[-2:]])
"""


@pytest.mark.parametrize(("define", "ask"), [("def", "{}.exec"), ("async def", "await {}.async_exec")])
async def test_who_cancels_hears_what_the_other_model_still_says(tmp_path: Path, define: str, ask: str) -> None:
    asked = ask.format("self.call('until')")
    body = f"responses = {asked}(decoupled=True)\n{READ.strip()}"
    calling(tmp_path, body, define=define)
    write_model(tmp_path, "until", UNTIL, DECOUPLED)
    with loaded(tmp_path) as models:
        assert await said(models) == ["1.0", "1.0", "0.0", "CANCELLED"]


async def test_a_request_that_is_cancelled_before_it_runs_ends(tmp_path: Path) -> None:
    calling(
        tmp_path,
        "responses = self.call('until').exec(decoupled=True)\nresponses.cancel()\nresponses.cancel()\n"
        "return self.answer([list(responses)[-1].error().code().name])",
    )
    write_model(tmp_path, "until", UNTIL, DECOUPLED)
    with loaded(tmp_path) as models:
        assert await said(models) == ["CANCELLED"]


@pytest.mark.parametrize(
    ("call", "message", "code"),
    [
        (
            "self.call('nobody')",
            "Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found",
            "NOT_FOUND",
        ),
        (
            "self.call('repeat')",
            "Model repeat is using the decoupled. The current BLS request call",
            "INTERNAL",
        ),
        ("self.call('square', request_id='fail')", "message: ValueError: cannot", "INTERNAL"),
        (
            "pb_utils.InferenceRequest(model_name='square', requested_output_names=[], inputs=[])",
            "expected 1 inputs but got 0 inputs for model 'square'",
            "INVALID_ARG",
        ),
    ],
)
async def test_what_goes_wrong_is_a_response(tmp_path: Path, call: str, message: str, code: str) -> None:
    calling(
        tmp_path,
        f"response = {call}.exec()\n"
        "return self.answer([response.has_error(), response.error().message(), response.error().code().name])",
    )
    with loaded(tmp_path) as models:
        has_error, text, name = await said(models)
    assert (has_error, name) == ("True", code)
    assert message in text


async def test_other_models_are_loaded_unloaded_and_looked_at(tmp_path: Path) -> None:
    calling(
        tmp_path,
        "pb_utils.load_model('x', config='{}', files={'file:1/model.py': b'text'})\n"
        "pb_utils.unload_model('x', unload_dependents=True)\n"
        "return self.answer([pb_utils.is_model_ready('square'), pb_utils.is_model_ready('x', '1')])",
    )
    peers = Peers()
    with loaded(tmp_path, peers) as models:
        assert await said(models) == ["True", "False"]
    assert peers.changes == [("load", "x", "{}", {"1/model.py": b"text"}), ("unload", "x", True)]


async def test_no_model_is_asked_outside_execute(tmp_path: Path) -> None:
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                request = pb_utils.InferenceRequest(
                    model_name="m", requested_output_names=[], inputs=[pb_utils.Tensor("IN", np.zeros(1))])
                try:
                    request.exec()
                except pb_utils.TritonModelException as error:
                    self.said = str(error)

            def execute(self, requests):
                made = np.array([self.said.encode()], np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)])]
    """
    write_model(tmp_path, "m", code)
    with loaded(tmp_path) as models:
        assert await said(models) == ["BLS is only supported during the 'execute' function."]
