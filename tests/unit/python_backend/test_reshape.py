"""`reshape` in config.pbtxt: clients see `dims`, the model has its own shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.python_models import answer, ask, fp32, loaded, model, write_model
from tengserve_backend.errors import InvalidRequestError, ModelExecutionError
from tengserve_backend.inference import InferTensor

# Answers with what it got, and with the shape of that.
ECHO = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                data = request.inputs()[0].as_numpy()
                shape = np.array(data.shape, np.float32)
                tensors = [pb_utils.Tensor("OUT", data), pb_utils.Tensor("SHAPE", shape)]
                responses.append(pb_utils.InferenceResponse(tensors))
            return responses
"""


def config(dims: str, inside: str, *, max_batch_size: int = 0, output: str | None = None) -> str:
    output = f"dims: {dims} reshape {{ shape: {inside} }}" if output is None else output
    return f"""
        backend: "python"
        max_batch_size: {max_batch_size}
        input [{{ name: "IN" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {inside} }} }}]
        output [{{ name: "OUT" data_type: TYPE_FP32 {output} }}, {{ name: "SHAPE" data_type: TYPE_FP32 dims: [-1] }}]
    """


def counted(*shape: int) -> InferTensor:
    count = int(np.prod(shape))
    return fp32("IN", *range(count), shape=shape)


@pytest.mark.parametrize(
    ("dims", "inside", "max_batch_size", "sent", "got"),
    [
        ("[4]", "[2, 2]", 0, (4,), (2, 2)),
        ("[2, 4, -1, 6]", "[8, -1, 1, 6]", 0, (2, 4, 3, 6), (8, 3, 1, 6)),
        ("[1]", "[]", 8, (5, 1), (5,)),
        ("[-1, 1]", "[-1]", 4, (2, 3, 1), (2, 3)),
        ("[-1, 2, -1]", "[-1, 2, 1, -1]", 0, (5, 2, 3), (5, 2, 1, 3)),
    ],
)
async def test_the_model_gets_its_own_shape_and_the_client_has_its_own_back(
    tmp_path: Path, dims: str, inside: str, max_batch_size: int, sent: tuple[int, ...], got: tuple[int, ...]
) -> None:
    with model(tmp_path, ECHO, config(dims, inside, max_batch_size=max_batch_size)) as m:
        tensor = counted(*sent)
        out, shape = (await answer(m, ask(tensor))).outputs
        assert tuple(shape.data) == got
        assert out.shape == sent
        assert np.array_equal(out.data, tensor.data)


async def test_clients_see_dims_and_are_checked_against_them(tmp_path: Path) -> None:
    with model(tmp_path, ECHO, config("[4]", "[2, 2]")) as m:
        assert [(spec.name, spec.shape) for spec in (*m.inputs, m.outputs[0])] == [("IN", (4,)), ("OUT", (4,))]
        with pytest.raises(InvalidRequestError, match=r"Expected \[4\], got \[2,2\]"):
            await answer(m, ask(counted(2, 2)))


async def test_an_output_of_another_shape_than_its_reshape_fails(tmp_path: Path) -> None:
    other = config("[4]", "[2, 2]", output="dims: [4] reshape { shape: [4, 1] }")
    with model(tmp_path, ECHO, other) as m:
        with pytest.raises(ModelExecutionError, match=r"output 'OUT' must have the shape \[4, 1\] of its reshape"):
            await answer(m, ask(counted(4)))
        assert (m.statistics().fail[0], m.statistics().success[0]) == (1, 0)
        # Only what is wanted must fit.
        assert (await answer(m, ask(counted(4), outputs=("SHAPE",)))).outputs[0].data.tolist() == [2, 2]


async def test_a_sender_says_which_output_does_not_fit(tmp_path: Path) -> None:
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                for shape in ((3,), (2, 2)):
                    try:
                        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(shape, np.float32))]))
                    except pb_utils.TritonModelException as error:
                        assert "must have the shape [2, 2]" in str(error), error
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    decoupled = config("[4]", "[2, 2]") + "model_transaction_policy { decoupled: true }"
    with model(tmp_path, code, decoupled) as m:
        responses = [response async for response in m.infer(ask(counted(4)))]
        assert [output.shape for response in responses for output in response.outputs] == [(4,)]


async def test_a_model_that_asks_another_sees_its_dims(tmp_path: Path) -> None:
    caller = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                request = pb_utils.InferenceRequest(
                    model_name="m", requested_output_names=["OUT", "SHAPE"], inputs=requests[0].inputs()
                )
                return [request.exec()]
    """
    write_model(tmp_path, "m", ECHO, config("[4]", "[2, 2]"))
    plain = """
        backend: "python"
        input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
        output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }, { name: "SHAPE" data_type: TYPE_FP32 dims: [-1] }]
    """
    write_model(tmp_path, "caller", caller, plain)
    with loaded(tmp_path) as models:
        out, shape = (await answer(models["caller"], ask(counted(4)))).outputs
        assert (out.shape, shape.data.tolist()) == ((4,), [2, 2])
