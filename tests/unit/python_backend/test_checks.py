"""Requests that do not fit the model, in Triton's words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.python_models import answer, ask, fp32, model
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import Datatype, InferRequest, InferTensor
from tengserve_backend.python_backend import PythonModel

CODE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_instance_name"]

        def execute(self, requests):
            import numpy as np
            said = np.array([self.name.encode()], np.object_)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)]) for _ in requests]
"""
CONFIG = """
    backend: "python"
    max_batch_size: 2
    input [
        { name: "IN" data_type: TYPE_FP32 dims: [2] },
        { name: "MORE" data_type: TYPE_FP32 dims: [-1] optional: true }
    ]
    output [{ name: "OUT" data_type: TYPE_STRING dims: [1] }]
"""
IN = fp32("IN", 1, 2, shape=(1, 2))


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonModel]:
    with model(tmp_path_factory.mktemp("models"), CODE, CONFIG) as m:
        yield m


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ask(IN, fp32("X", 1)), "[request id: <id_unknown>] unexpected inference input 'X' for model 'm'"),
        (ask(IN, IN), "[request id: <id_unknown>] input 'IN' already exists in request"),
        (
            ask(fp32("MORE", 1, shape=(1, 1)), request_id="r1"),
            "[request id: r1] expected number of inputs between 1 and 2 but got 1 inputs for model 'm'. Got input(s) "
            "['MORE'], but missing required input(s) ['IN']. Please provide all required input(s).",
        ),
        (ask(IN, outputs=("Y",)), "[request id: <id_unknown>] unexpected inference output 'Y' for model 'm'"),
        (ask(IN, outputs=("OUT", "OUT")), "[request id: <id_unknown>] output 'OUT' already exists in request"),
        (
            ask(InferTensor("IN", Datatype.INT32, np.zeros((1, 2), np.int32))),
            "[request id: <id_unknown>] inference input 'IN' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            ask(fp32("IN", *range(6), shape=(3, 2))),
            "[request id: <id_unknown>] inference request batch-size must be <= 2 for 'm'",
        ),
        (
            ask(fp32("IN", 1, 2, 3, shape=(1, 3))),
            "[request id: <id_unknown>] unexpected shape for input 'IN' for model 'm'. Expected [-1,2], got [1,3]. "
            "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to "
            "each input shape. If you want to specify the full shape including the batch dim in your input dims "
            "config, try setting max_batch_size to zero. See the model configuration docs for more info on "
            "max_batch_size.",
        ),
        (
            ask(fp32("IN", 1, shape=())),
            "[request id: <id_unknown>] input 'IN' has no shape but model requires batch dimension for 'm'",
        ),
        (
            ask(IN, fp32("MORE", 1, 2, shape=(2, 1))),
            "[request id: <id_unknown>] input 'MORE' batch size does not match other inputs for 'm'",
        ),
    ],
)
async def test_what_does_not_fit_is_refused(checked: PythonModel, request_: InferRequest, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await answer(checked, request_)
    assert caught.value.message == says


async def test_without_optional_inputs_the_text_is_the_older_one(tmp_path: Path) -> None:
    with model(tmp_path, CODE) as m, pytest.raises(InvalidRequestError) as caught:
        await answer(m, InferRequest("m", "", "", ()))
    assert caught.value.message == (
        "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing "
        "required input(s) ['IN']. Please provide all required input(s)."
    )


async def test_optional_inputs_may_be_left_out(checked: PythonModel) -> None:
    assert (await answer(checked, ask(IN))).outputs[0].data.tolist() == [b"m_0_0"]


async def test_the_model_tells_its_tensors(checked: PythonModel) -> None:
    assert [(spec.name, spec.shape, spec.optional) for spec in checked.inputs] == [
        ("IN", (-1, 2), False),
        ("MORE", (-1, -1), True),
    ]
    assert (checked.platform, checked.max_batch_size, checked.decoupled) == ("python", 2, False)
