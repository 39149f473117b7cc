from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tengserve_adapter.tensors.json_data import flatten, from_json, to_json
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import Datatype, InferTensor

NUMBERS = [d for d in Datatype if d not in (Datatype.FP16, Datatype.BF16, Datatype.BYTES)]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Datatype, np.ndarray[Any, Any]]:
    datatype = draw(st.sampled_from(NUMBERS))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    elements = npst.from_dtype(datatype.dtype, allow_nan=False, allow_infinity=False)
    return datatype, draw(npst.arrays(datatype.dtype, shape, elements=elements))


@settings(max_examples=150, deadline=None)
@given(arrays())
def test_nested_and_flat_lists_are_the_same_tensor(case: tuple[Datatype, np.ndarray[Any, Any]]) -> None:
    datatype, array = case
    flat = json.loads(json.dumps(array.reshape(-1).tolist()))
    back = from_json("x", datatype, array.shape, flat)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    if array.ndim:
        np.testing.assert_array_equal(from_json("x", datatype, array.shape, array.tolist()), array)


@settings(max_examples=100, deadline=None)
@given(arrays())
@example((Datatype.FP32, np.array([np.finfo(np.float32).max, np.finfo(np.float32).min], np.float32)))
def test_what_is_written_reads_as_it_was(case: tuple[Datatype, np.ndarray[Any, Any]]) -> None:
    datatype, array = case
    written = orjson.dumps(to_json(InferTensor("x", datatype, array)), option=orjson.OPT_SERIALIZE_NUMPY)
    np.testing.assert_array_equal(from_json("x", datatype, array.shape, json.loads(written)), array)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_texts_survive(items: list[str]) -> None:
    array = from_json("x", Datatype.BYTES, [len(items)], items)
    assert array.tolist() == [item.encode() for item in items]
    assert to_json(InferTensor("x", Datatype.BYTES, array)) == items


def test_ragged_nesting_is_read_row_major() -> None:
    assert from_json("x", Datatype.INT8, [2, 2], [1, [[2], 3], [], 4]).tolist() == [[1, 2], [3, 4]]


def test_booleans_may_be_bits() -> None:
    assert from_json("x", Datatype.BOOL, [3], [True, 0, 1]).tolist() == [True, False, True]


def test_infinity_is_a_number() -> None:
    assert from_json("x", Datatype.FP32, [2], [math.inf, -math.inf]).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "complaint"),
    [
        (Datatype.INT32, [1], 1, "must be a list of elements, got 1"),
        (Datatype.INT32, [1], None, "must be a list of elements, got null"),
        (Datatype.INT32, [3], [1, 2], "has 3 elements, which does not match the 2 elements of its 'data'"),
        (Datatype.INT32, [1], [1.0], "must be integer, got 1.0"),
        (Datatype.INT32, [1], [True], "must be integer, got true"),
        (Datatype.INT8, [2], [127, 128], "must be INT8, so in [-128, 127], got 128"),
        (Datatype.UINT64, [1], [2**64], "must be UINT64, so in [0, 18446744073709551615]"),
        (Datatype.FP32, [1], [1e39], "must be inside the range of FP32, got 1e+39"),
        (Datatype.FP64, [1], [10**400], "must be inside the range of FP64"),
        (Datatype.FP64, [1], ["1"], 'must be number, got "1"'),
        (Datatype.BOOL, [1], [2], "must be boolean, got 2"),
        (Datatype.BOOL, [1], [None], "must be boolean, got null"),
        (Datatype.BYTES, [1], [5], "must be string, got 5"),
        (Datatype.FP16, [1], [1.0], "sending FP16 data via JSON is not supported"),
        (Datatype.BF16, [1], [1.0], "Please use the binary data format for input 'x'"),
    ],
)
def test_wrong_data_is_refused(datatype: Datatype, shape: list[int], data: object, complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        from_json("x", datatype, shape, data)
    assert complaint in refused.value.message
    assert refused.value.field == "x"


def test_nesting_is_bounded() -> None:
    data: list[Any] = [1]
    for _ in range(98):
        data = [data]
    assert from_json("x", Datatype.INT8, [1], data).tolist() == [1]
    with pytest.raises(InvalidRequestError, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        from_json("x", Datatype.INT8, [1], [[data]])


def test_a_deep_list_beside_many_elements_costs_no_walk_a_level() -> None:
    # One walk over all elements for each level would take minutes, and the interpreter's lock for seconds at a time.
    count = 4_000_000
    deep: list[Any] = [1]
    for _ in range(98):
        deep = [deep]
    flat = flatten("x", [*itertools.repeat(0, count), deep])
    assert len(flat) == count + 1
    assert flat[-1] == 1


def test_outputs_without_a_json_form() -> None:
    with pytest.raises(InvalidRequestError, match="binary data format for output 'y'"):
        to_json(InferTensor("y", Datatype.BF16, np.zeros(1, np.uint16)))
    with pytest.raises(InvalidRequestError, match="output 'y' is not UTF-8 text"):
        to_json(InferTensor("y", Datatype.BYTES, np.array([b"\xff"], np.object_)))
