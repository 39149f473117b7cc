"""A message is read as ever when its head was read before: the same request, or the same mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from property.test_grpc_requests import REQUESTS
from support.tensor_models import plain_models
from tengserve_adapter.grpc.heads import MAX_CONTENTS, MAX_HEAD_BYTES, parts_of
from tengserve_adapter.grpc.incoming import MAX_HEADS, Incoming, Reader
from tengserve_adapter.grpc.schema import schema
from tengserve_backend.errors import ModelNotFoundError, TengserveError
from tengserve_backend.inference import Datatype, TensorModel, TensorSpec

REQUEST = schema().messages["ModelInferRequest"]
MODELS = plain_models()
NAMES = ("IN", "é", "")


def find(name: str, version: str) -> TensorModel:
    if name not in MODELS or version:
        raise ModelNotFoundError(f"no {name!r} {version!r}")
    return MODELS[name]


def rarely(value: Any, usual: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).map(lambda number: value if number == 7 else usual)


@st.composite
def plain(draw: st.DrawFn) -> Any:
    """A message as clients write it, with raw contents of the right size or nearly so."""
    message = REQUEST(
        model_name=draw(rarely("nobody", "echo")), model_version=draw(rarely("1", "")), id=draw(st.text(max_size=3))
    )
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=draw(rarely(False, True)))):
        datatype = draw(st.sampled_from(Datatype))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        message.inputs.add(name=name, datatype=datatype.value, shape=shape)
        size = int(np.prod(shape, dtype=int)) * (datatype.itemsize or 5) + draw(rarely(1, 0))
        data = draw(st.binary(min_size=size, max_size=size))
        if datatype is Datatype.BYTES and size % 5 == 0:
            data = b"\x01\0\0\0x" * (size // 5)
        message.raw_input_contents.append(data)
    for name in draw(st.lists(st.sampled_from(["OUT", "OTHER", "x"]), max_size=2, unique=True)):
        message.outputs.add(name=name)
    return message


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    message = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(message)))
        message[index : index + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(message)


def told(incoming: Incoming) -> object:
    """Everything that a message was read into, to be compared."""
    names = (incoming.size, incoming.model_name, incoming.version, incoming.request_id)
    work = incoming.work
    if isinstance(work, Exception):
        assert isinstance(work, TengserveError)
        return names, type(work), work.message, work.field
    model, asked = work
    request = asked.request
    tensors = [
        (one.name, one.datatype, one.shape, one.data.dtype, one.data.tobytes(), dict(one.parameters))
        if one.datatype is not Datatype.BYTES
        else (one.name, one.shape, one.data.tolist())
        for one in request.inputs
    ]
    outputs = [(one.name, one.classification, dict(one.parameters)) for one in request.outputs]
    rest = (request.priority, request.timeout_us, request.sequence, dict(request.parameters), asked.empty_final)
    return names, model, request.model, request.version, request.request_id, tensors, outputs, repr(rest)


def check(reader: Reader, data: bytes) -> None:
    assert told(reader.read(data)) == told(Reader(find).read(data))


@given(plain(), plain(), st.data())
def test_a_message_is_read_alike_whatever_was_read_before(first: Any, second: Any, draw: st.DataObject) -> None:
    reader = Reader(find)
    data = first.SerializeToString()
    check(reader, data)
    check(reader, data)
    # The same head with another id and contents, and contents of another message.
    first.id = draw.draw(st.text(max_size=200))
    check(reader, first.SerializeToString())
    for contents in (second.raw_input_contents, [content + b"x" for content in first.raw_input_contents]):
        other = REQUEST.FromString(data)
        other.ClearField("raw_input_contents")
        other.raw_input_contents.extend(contents)
        check(reader, other.SerializeToString())
    check(reader, data + second.SerializeToString())
    check(reader, draw.draw(damaged(data)))


@given(REQUESTS, st.data())
def test_so_is_any_other_message(fields: dict[str, Any], draw: st.DataObject) -> None:
    reader = Reader(find)
    data = REQUEST(model_name="echo", **fields).SerializeToString()
    check(reader, data)
    check(reader, data)
    check(reader, draw.draw(damaged(data)))


@given(plain())
def test_parts_are_what_the_message_says(message: Any) -> None:
    parts = parts_of(message.SerializeToString())
    if not message.raw_input_contents:
        assert parts is None
        return
    assert parts is not None
    assert (parts.request_id, parts.raw) == (message.id, list(message.raw_input_contents))
    message.ClearField("id")
    message.ClearField("raw_input_contents")
    assert REQUEST.FromString(parts.head) == message


def _field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


NAME, ID, RAW = _field(1, b"echo"), _field(3, b"1"), _field(7, b"\1\2\3\4")
IN = _field(5, REQUEST.InferInputTensor(name="IN", datatype="INT32", shape=[1]).SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        NAME + ID + ID + IN + RAW,
        NAME + ID + _field(3, b"2") + IN + RAW,
        _field(1, b"x") + NAME + ID + IN + RAW,
        NAME + IN + RAW + b"\x3a",
        NAME + IN + RAW + b"\x1a",
        NAME + IN + b"\x3a\x84\x00\1\2\3\4",
        NAME + IN + b"\x3a\x84\x80\x80\x80\x80\x00\1\2\3\4",
        NAME + IN + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        NAME + IN + b"\x3a\x84",
        NAME + _field(3, b"\xff") + IN + RAW,
        NAME + IN + RAW + ID,
        NAME + RAW + IN,
        NAME + IN + RAW + RAW,
        NAME + IN + RAW * (MAX_CONTENTS + 1),
        NAME + _field(5, b"\x0a") + RAW,
        NAME + _field(9, b"x") + IN + RAW,
        NAME + b"\x08\x01" + IN + RAW,
        NAME + _field(3, b"x" * 127) * 9 + IN + RAW,
        REQUEST(model_name="echo", id="x" * MAX_HEAD_BYTES).SerializeToString() + IN + RAW,
    ],
)
def test_a_message_in_a_form_that_no_client_writes(data: bytes) -> None:
    reader = Reader(find)
    check(reader, NAME + ID + IN + RAW)
    check(reader, data)
    check(reader, data)


def test_the_heads_that_are_remembered_are_bounded() -> None:
    reader = Reader(find)
    for size in range(2 * MAX_HEADS):
        message = REQUEST(model_name="echo", raw_input_contents=[bytes(size)])
        message.inputs.add(name="IN", datatype="UINT8", shape=[size])
        assert not isinstance(reader.read(message.SerializeToString()).work, Exception)
        assert reader.remembered() <= MAX_HEADS


def test_outputs_are_compared_with_those_that_the_model_has_by_now() -> None:
    model = replace(MODELS["echo"], outputs=(TensorSpec("OUT", Datatype.INT32, (-1,)),))
    reader = Reader(lambda name, version: model)
    data = REQUEST(model_name="echo", outputs=[{"name": "OUT"}]).SerializeToString().replace(NAME, NAME + IN) + RAW
    assert not isinstance(reader.read(data).work, Exception)
    model.outputs = (TensorSpec("OTHER", Datatype.INT32, (-1,)),)
    refused = reader.read(data).work
    assert isinstance(refused, TengserveError)
    assert "unexpected inference output 'OUT'" in refused.message
