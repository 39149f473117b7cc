"""Tensors of the python_backend API: arrays, bytes, DLPack, and the helper functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.python_backend.api import helpers
from tengserve_backend.python_backend.api.errors import TritonError, TritonModelException
from tengserve_backend.python_backend.api.logger import make_logger
from tengserve_backend.python_backend.api.messages import InferenceRequest, InferenceResponse
from tengserve_backend.python_backend.api.tensor import Tensor

DATATYPES = [datatype for datatype in Datatype if datatype not in (Datatype.BYTES, Datatype.BF16)]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_passes_by_numpy_and_by_dlpack(datatype: Datatype) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(datatype.dtype)
    tensor = Tensor.from_infer(InferTensor("T", datatype, array))
    assert tensor.as_numpy().dtype == datatype.dtype
    assert helpers.triton_to_numpy_type(tensor.triton_dtype()) == datatype.dtype.type
    for source in (tensor, torch.from_dlpack(tensor), tensor.to_dlpack(), np.from_dlpack(tensor)):
        back = Tensor.from_dlpack("T", source).to_infer()
        assert (back.datatype, back.data.tolist()) == (datatype, array.tolist())


def test_bf16_passes_by_dlpack_only() -> None:
    tensor = Tensor.from_dlpack("T", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()
    sent = tensor.to_infer()
    assert (sent.datatype, sent.data.tolist()) == (Datatype.BF16, [0x3FC0, 0xC000])
    back = torch.from_dlpack(Tensor.from_infer(sent))
    assert (back.dtype, back.tolist()) == (torch.bfloat16, [1.5, -2.0])
    assert tensor.triton_dtype() == 14


def test_bytes_are_arrays_of_objects() -> None:
    tensor = Tensor("T", np.array([[b"a\0", "\u00fc", 3]], np.object_))
    assert tensor.to_infer().data.tolist() == [[b"a\0", "\u00fc".encode(), b"3"]]
    assert tensor.shape() == [1, 3]
    with pytest.raises(TritonModelException, match="DLPack does not have support for string tensors"):
        tensor.to_dlpack()
    assert Tensor("T", np.array([b"ab"])).to_infer().data.tolist() == [b"ab"]


def test_what_is_sent_is_a_copy() -> None:
    array = np.zeros(2, np.float32)
    sent = Tensor("T", array).to_infer()
    array[:] = 1
    assert sent.data.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Tensor("", np.zeros(1)), "Tensor name cannot be an empty string."),
        (lambda: Tensor("T", np.zeros(1, np.complex64)), "no datatype of Triton"),
        (lambda: Tensor.from_dlpack("T", [1]), "Provided tensor is not supported"),
        (lambda: Tensor.from_dlpack("T", torch.zeros(2, 3).T), "DLPack tensor is not contiguous"),
        (
            lambda: InferenceResponse(parameters={"a": 1.5}),
            "values to have type bool/int/str, found type <class 'float'>",
        ),
        (lambda: InferenceResponse(parameters={1: "a"}), "keys to have type str, found type <class 'int'>"),
        (lambda: InferenceResponse(output_tensors=[None]), "Output tensor for inference response should not be empty."),
        (
            lambda: InferenceRequest(inputs=[None], requested_output_names=[], model_name="n", request_id="r"),
            "Input tensor for request with id 'r' and model name 'n' should not be empty.",
        ),
        (
            lambda: InferenceRequest(inputs=[], requested_output_names=[""], model_name="n"),
            "Requested output name for request with id '' and model name 'n' should not be empty.",
        ),
        (
            lambda: InferenceRequest(inputs=[], requested_output_names=[], model_name="n", correlation_id=1.5),
            "Correlation ID must be integer or string",
        ),
    ],
)
def test_wrong_calls_say_what_is_wrong(call: object, says: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        call()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Tensor(None, np.zeros(1)),
        lambda: Tensor("T", None),
        lambda: Tensor("T", [1.0]),
        lambda: InferenceRequest(inputs=None, requested_output_names=[], model_name="n"),
        lambda: InferenceRequest(inputs=[], requested_output_names=[None], model_name="n"),
        lambda: InferenceRequest(inputs=[], requested_output_names=[], model_name="n", correlation_id=None),
        *(
            lambda name=name: InferenceRequest(
                **{"inputs": [], "requested_output_names": [], "model_name": "n", name: None}
            )
            for name in ("model_name", "request_id", "model_version", "flags", "timeout")
        ),
        lambda: make_logger("m").log("text", 1),
        lambda: make_logger("m").log("text", None),
        lambda: make_logger("m").log_info(None),
    ],
)
def test_arguments_of_another_type_are_type_errors(call: object) -> None:
    with pytest.raises(TypeError):
        call()


def test_byte_tensors_are_serialized_with_their_lengths() -> None:
    array = np.array([[b"ab", "c"]], np.object_)
    data = helpers.serialize_byte_tensor(array)
    assert data == b"\x02\0\0\0ab\x01\0\0\0c"
    assert helpers.deserialize_bytes_tensor(data).tolist() == [b"ab", b"c"]
    assert helpers.serialize_byte_tensor(np.array([], np.object_)) == ()
    assert helpers.serialize_byte_tensor(np.zeros(1)) is None
    with pytest.raises(ValueError, match="incomplete"):
        helpers.deserialize_bytes_tensor(data[:-1])


def test_types_are_translated_both_ways() -> None:
    assert helpers.triton_string_to_numpy("TYPE_FP16") == np.float16
    assert helpers.triton_string_to_numpy("TYPE_STRING") == np.object_
    assert helpers.numpy_to_triton_type(np.float32) == 11
    assert helpers.numpy_to_triton_type(np.bytes_) == 13
    assert helpers.numpy_to_triton_type(np.complex64) is None
    assert helpers.triton_to_numpy_type(14) is None


def test_tensors_and_configurations_are_found_by_name() -> None:
    tensor = Tensor("A", np.zeros(1))
    request = InferenceRequest(inputs=[tensor], requested_output_names=[], model_name="n")
    assert helpers.get_input_tensor_by_name(request, "A") is tensor
    assert helpers.get_input_tensor_by_name(request, "B") is None
    assert helpers.get_output_tensor_by_name(InferenceResponse([tensor]), "A") is tensor
    config = {"input": [{"name": "A"}], "output": [{"name": "B"}], "model_transaction_policy": {"decoupled": True}}
    assert helpers.get_input_config_by_name(config, "A") == {"name": "A"}
    assert helpers.get_output_config_by_name(config, "A") is None
    assert helpers.using_decoupled_model_transaction_policy(config)
    assert not helpers.using_decoupled_model_transaction_policy({})


def test_an_error_has_its_code() -> None:
    response = InferenceResponse(error=TritonError("no", TritonError.UNAVAILABLE))
    error = response.error()
    assert response.has_error()
    assert error is not None
    assert (error.message(), error.code()) == ("no", TritonError.UNAVAILABLE)
    assert TritonError("x").code() == TritonError.INTERNAL
