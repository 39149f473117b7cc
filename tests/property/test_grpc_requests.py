"""Whatever a client sends as a ModelInferRequest is a request or the client's mistake, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.tensor_models import plain_models
from tengserve_adapter.grpc.codec import Asked, decode_request, encode_response
from tengserve_adapter.grpc.schema import parse, schema
from tengserve_backend.errors import RequestError
from tengserve_backend.inference import Datatype, InferResponse

REQUEST = schema().messages["ModelInferRequest"]
ECHO = plain_models()["echo"]

PARAMETERS = st.dictionaries(
    st.sampled_from(["x", "priority", "timeout", "sequence_id", "sequence_start", "classification", "triton_x"]),
    st.one_of(
        st.fixed_dictionaries({"bool_param": st.booleans()}),
        st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
        st.fixed_dictionaries({"uint64_param": st.integers(0, 2**64 - 1)}),
        st.fixed_dictionaries({"double_param": st.floats()}),
        st.fixed_dictionaries({"string_param": st.text(max_size=5)}),
        st.just({}),
    ),
    max_size=3,
)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=3),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
        "uint_contents": st.lists(st.integers(0, 2**32 - 1), max_size=3),
        "fp32_contents": st.lists(st.floats(width=32), max_size=3),
        "bytes_contents": st.lists(st.binary(max_size=3), max_size=3),
    },
)
SHAPES = st.lists(st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), max_size=35)
INPUTS = st.fixed_dictionaries(
    {
        "name": st.text(max_size=2),
        "datatype": st.sampled_from([*Datatype.__members__, "", "fp32"]),
        "shape": SHAPES,
        "parameters": PARAMETERS,
    },
    optional={"contents": CONTENTS},
)
REQUESTS = st.fixed_dictionaries(
    {
        "inputs": st.lists(INPUTS, max_size=2),
        "outputs": st.lists(st.fixed_dictionaries({"name": st.text(max_size=2), "parameters": PARAMETERS}), max_size=2),
        "parameters": PARAMETERS,
        "raw_input_contents": st.lists(st.binary(max_size=16), max_size=2),
    }
)


def take(data: bytes) -> None:
    with contextlib.suppress(RequestError):
        check(decode_request(ECHO, parse(REQUEST, data)))


def check(asked: Asked) -> None:
    for tensor in asked.request.inputs:
        assert tensor.data.dtype == tensor.datatype.dtype
    answer = InferResponse("echo", "1", "", asked.request.inputs, asked.request.parameters)
    assert encode_response(ECHO, asked.request, answer).SerializeToString() is not None


@given(REQUESTS)
def test_any_message_is_a_request_or_a_mistake(fields: dict[str, Any]) -> None:
    take(REQUEST(**fields).SerializeToString())


@given(REQUESTS, st.data())
def test_any_damage_to_a_message_is_a_mistake(fields: dict[str, Any], data: st.DataObject) -> None:
    message = bytearray(REQUEST(**fields).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(message)))
        message[index : index + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    take(bytes(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_mistake_or_a_request(data: bytes) -> None:
    take(data)
