"""Messages of the v2 protocol over gRPC that no client of good will sends, as strategies of hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from tengserve_adapter.grpc.schema import Message, message_class, schema
from tengserve_backend.inference import Datatype

MARK = "\x01\x02\x03"
"""In a string of a message; on the wire it may become three bytes that are no UTF-8, or half a character."""
NO_TEXTS = (b"\xff\xfe\xfd", b"\xed\xa0\x80", b"\xe2\x82\x01")

WORDS = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "classification", "binary_data")
LLM_WORDS = ("max_tokens", "temperature", "top_k", "top_p", "stream", "stop", "seed", "sampling_parameters")
NAMES = ("IN", "OUT", "TEXT", "INPUT0", "text_input", "input_ids", "config", "file:1/model.py", "unload_dependents")

BOUNDS = (0, 1, -1, 2, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
"""Numbers at the ends of types; those that a type cannot hold are left out of it."""
_DEPTH = 3


def texts(*known: str) -> st.SearchStrategy[str]:
    """Known words, any text, and text that will be none on the wire."""
    return st.sampled_from([*known, ""]) | st.text(max_size=5) | st.just(f"a{MARK}")


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    """Numbers of a type."""
    return st.sampled_from([bound for bound in BOUNDS if low <= bound <= high]) | st.integers(low, high)


_INT32, _INT64 = numbers(-(2**31), 2**31 - 1), numbers(-(2**63), 2**63 - 1)
_UINT32, _UINT64 = numbers(0, 2**32 - 1), numbers(0, 2**64 - 1)
_SCALARS: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
    FieldDescriptor.TYPE_ENUM: _INT32,
}


def messages(descriptor: Descriptor, names: Sequence[str], depth: int = _DEPTH) -> st.SearchStrategy[Message]:
    """Any message of a type.

    Args:
        descriptor: of the type.
        names: what texts are made of, now and then.
        depth: of messages in it.
    """
    fields = {
        field.name: _values(field, names, depth) for field in descriptor.fields if depth or not field.message_type
    }
    kind = message_class(descriptor)
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def _values(field: FieldDescriptor, names: Sequence[str], depth: int) -> st.SearchStrategy[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return st.dictionaries(_value(key, names, depth), _value(value, names, depth), max_size=3)
    return st.lists(_value(field, names, depth), max_size=3) if field.is_repeated else _value(field, names, depth)


def _value(field: FieldDescriptor, names: Sequence[str], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, names, depth - 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return texts(*names)
    return _SCALARS[field.type]


@st.composite
def on_the_wire(draw: Callable[..., Any], kinds: st.SearchStrategy[Message]) -> bytes:
    """Bytes of messages: as they are, with text that is none, damaged; or any bytes."""
    data: bytes = draw(kinds).SerializeToString()
    data = data.replace(MARK.encode(), draw(st.sampled_from([MARK.encode(), *NO_TEXTS])))
    match draw(st.integers(0, 5)):
        case 0:
            damaged = bytearray(data)
            for _ in range(draw(st.integers(1, 4))):
                index = draw(st.integers(0, len(damaged)))
                damaged[index : index + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
            return bytes(damaged)
        case 1:
            return draw(st.binary(max_size=100))
    return data


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a model that is right: what `infer_requests` starts from."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def raw(self) -> bytes:
        """Right content."""
        count = int(np.prod(self.shape))
        return b"\2\0\0\0hi" * count if self.datatype.itemsize is None else bytes(count * self.datatype.itemsize)


SHAPES = (
    st.lists(st.integers(-1, 4), max_size=4)
    | st.lists(_INT64, max_size=4)
    | st.lists(st.sampled_from([2**16, 2**31, 2**32, 2**62]), min_size=2, max_size=5)
    | st.lists(st.just(1), min_size=30, max_size=70)
)
"""Small, huge, negative; products that wrap around to something small; too many."""
_PARAMETER = schema().messages["InferParameter"].DESCRIPTOR


def infer_requests(models: Mapping[str, Sequence[Input]]) -> st.SearchStrategy[Message]:
    """Requests of which something is wrong, now and then nothing.

    Args:
        models: by name, with their inputs.
    """
    parameters = st.dictionaries(
        texts(*WORDS, *LLM_WORDS, "triton_enable_empty_final_response", "triton_x", "shared_memory_region"),
        messages(_PARAMETER, ("a", "1", "{}"), 1),
        max_size=2,
    )
    some_parameters: st.SearchStrategy[dict[str, Message]] = st.just({}) | parameters
    contents = messages(schema().messages["InferTensorContents"].DESCRIPTOR, ("x",), 1)

    @st.composite
    def made(draw: Callable[..., Any]) -> Message:
        def mostly(right: Any, wrong: st.SearchStrategy[Any]) -> Any:
            return draw(wrong) if draw(st.integers(0, 7)) == 7 else right

        model = draw(st.sampled_from(sorted(models)))
        request = schema().messages["ModelInferRequest"](
            model_name=mostly(model, texts("nobody")),
            model_version=mostly("", texts("1", "2", "-1", "9" * 30)),
            id=mostly("r", texts()),
            parameters=draw(some_parameters),
        )
        inputs = mostly(list(models[model]), st.lists(st.sampled_from(models[model]), max_size=3))
        typed = draw(st.integers(0, 3)) == 3
        for right in inputs:
            request.inputs.add(
                name=mostly(right.name, texts(*NAMES)),
                datatype=mostly(right.datatype.value, texts(*Datatype.__members__, "fp32")),
                shape=mostly(right.shape, SHAPES),
                parameters=mostly({}, parameters),
                contents=draw(contents) if typed else mostly(None, contents),
            )
            if not typed:
                request.raw_input_contents.append(mostly(right.raw(), st.binary(max_size=70)))
        for name in mostly([], st.lists(texts(*NAMES), max_size=3)):
            request.outputs.add(name=name, parameters=draw(some_parameters))
        request.raw_input_contents.extend(mostly([], st.lists(st.binary(max_size=9), max_size=2)))
        return request

    return made()
