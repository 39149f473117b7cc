from __future__ import annotations

import numpy as np
import pytest

from tengserve_adapter.tensors.raw import decode_raw, element_count, encode_raw
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.inference.datatypes import Array


@pytest.mark.parametrize("datatype", [datatype for datatype in Datatype if datatype is not Datatype.BYTES])
def test_numbers_survive_the_wire(datatype: Datatype) -> None:
    data = np.array([[0, 1, 1], [1, 0, 1]]).astype(datatype.dtype)
    raw = encode_raw(InferTensor("x", datatype, data))
    assert len(raw) == 6 * datatype.dtype.itemsize
    back = decode_raw("x", datatype, (2, 3), raw)
    assert back.dtype == datatype.dtype
    np.testing.assert_array_equal(back, data)


def test_numbers_are_little_endian_and_row_major() -> None:
    data = np.array([[1, 2], [3, 256]], np.uint16).T
    assert encode_raw(InferTensor("x", Datatype.UINT16, data)) == b"\x01\x00\x03\x00\x02\x00\x00\x01"


def test_texts_survive_the_wire() -> None:
    data = np.array([[b"", b"one"], ["zwölf".encode(), b"\x00\xff"]], np.object_)
    raw = encode_raw(InferTensor("x", Datatype.BYTES, data))
    assert raw[:11] == b"\x00\x00\x00\x00\x03\x00\x00\x00one"
    np.testing.assert_array_equal(decode_raw("x", Datatype.BYTES, (2, 2), raw), data)


def test_any_byte_but_zero_is_true() -> None:
    assert decode_raw("x", Datatype.BOOL, (3,), b"\x00\x02\x01").tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "complaint"),
    [
        (Datatype.FP32, (2,), b"\0" * 7, "must have 8 bytes for shape [2] of FP32, got 7"),
        (Datatype.FP32, (-1,), b"", "none negative, and at most 281474976710656 elements, got [-1]"),
        (Datatype.FP32, (1,) * 33, b"\0" * 4, "at most 32 dimensions"),
        (Datatype.FP64, (0, 1 << 62), b"", "at most 281474976710656 elements"),
        (Datatype.BYTES, (1,), b"\x05\0\0\0four", "must have 1 elements of BYTES"),
        (Datatype.BYTES, (1,), b"\x01\0\0\0ab", "must have 1 elements of BYTES"),
        (Datatype.BYTES, (2,), b"\x04\0\0\0abcd", "must have 2 elements of BYTES"),
        (Datatype.BYTES, (1 << 48,), b"\0" * 8, "must have 281474976710656 elements of BYTES"),
    ],
)
def test_wrong_bytes_are_refused(datatype: Datatype, shape: tuple[int, ...], data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode_raw("x", datatype, shape, data)
    assert complaint in refused.value.message
    assert refused.value.field == "x"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (np.ndarray((2, 2), np.uint8, b"abcd"), b"abcd"),
        (np.ndarray((2, 2), np.uint8, b"abcd").T, b"acbd"),
        (np.ndarray(4, np.uint8, b"abcd")[1:3], b"bc"),
        (np.ndarray(4, np.uint8, b"abcd")[::-1], b"dcba"),
        (np.ndarray(2, np.uint8, b"abcd"), b"ab"),
        (np.ndarray((2, 0), np.uint8, b""), b""),
    ],
)
def test_elements_that_lie_in_bytes_are_those_that_the_array_shows(data: Array, expected: bytes) -> None:
    assert encode_raw(InferTensor("x", Datatype.UINT8, data)) == expected


def test_elements_that_lie_in_bytes_are_not_copied() -> None:
    memory = bytes(range(8))
    assert encode_raw(InferTensor("x", Datatype.UINT16, np.ndarray((2, 2), np.uint16, memory))) is memory


@pytest.mark.parametrize(
    ("shape", "count"), [((), 1), ((2, 3), 6), ((0,), 0), ((0, 2**48), 0), ([1] * 32, 1), ((2**48,), 2**48)]
)
def test_elements_are_counted(shape: tuple[int, ...], count: int) -> None:
    assert element_count("x", shape) == count


@pytest.mark.parametrize("shape", [(-1,), (-1, -1), (-2, 0), (0, 2**48 + 1), (2**48 + 1,), [1] * 33, [2**62] * 4096])
def test_shapes_that_no_tensor_has(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="at most 32 dimensions, none negative"):
        element_count("x", shape)
