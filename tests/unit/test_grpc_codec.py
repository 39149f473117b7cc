"""The bytes of an answer over gRPC are those of its message, though the message is not made whole."""

from __future__ import annotations

import numpy as np
import pytest

from support.tensor_models import plain_models
from tengserve_adapter.grpc import codec
from tengserve_adapter.grpc.codec import encode_response, serialize_response
from tengserve_adapter.grpc.schema import schema
from tengserve_backend.errors import GenerationFailedError
from tengserve_backend.inference import Datatype, InferRequest, InferResponse, InferTensor

ECHO = plain_models()["echo"]
REQUEST = InferRequest("echo", "", "7", ())


def response(*sizes: int) -> InferResponse:
    outputs = [
        InferTensor(f"OUT{index}", Datatype.UINT8, np.arange(size, dtype=np.uint8), {"n": index})
        for index, size in enumerate(sizes)
    ]
    return InferResponse("echo", "1", "7", tuple(outputs), {"text": "x", "flag": True})


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 2), (127,), (128, 3), (16_383, 16_384), (2_097_152,)])
def test_an_answer_is_the_bytes_of_its_message(sizes: tuple[int, ...]) -> None:
    data = serialize_response(ECHO, REQUEST, response(*sizes))
    message = schema().messages["ModelInferResponse"].FromString(data)
    assert message == encode_response(ECHO, REQUEST, response(*sizes))
    assert [len(raw) for raw in message.raw_output_contents] == list(sizes)


def test_an_answer_without_parameters_is_the_bytes_of_its_message_too() -> None:
    for request_id, name, shape in (
        ("7", "OUT", (2, 3)),
        ("", "OUT", (2, 3)),
        ("\u00e9" * 99, "", (0,)),
        ("8", "OUT", ()),
    ):
        size = int(np.prod(shape, dtype=int))
        output = InferTensor(name, Datatype.INT64, np.arange(size, dtype=np.int64).reshape(shape))
        answer = InferResponse("echo", "1", request_id, (output, output))
        message = schema().messages["ModelInferResponse"].FromString(serialize_response(ECHO, REQUEST, answer))
        assert message == encode_response(ECHO, REQUEST, answer)


def test_an_answer_that_no_message_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_MESSAGE_BYTES", 100)
    with pytest.raises(GenerationFailedError, match="more than 100 bytes"):
        serialize_response(ECHO, REQUEST, response(101))
