from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tengserve_adapter.tensors.classification import classify
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import Datatype, InferTensor, TensorSpec

SPEC = TensorSpec("y", Datatype.FP32, (3,), labels=("cat", "", "dog"))


def of(data: Any, datatype: Datatype = Datatype.FP32) -> InferTensor:
    return InferTensor("y", datatype, np.array(data, datatype.dtype))


def test_the_largest_come_first_with_their_labels() -> None:
    found = classify(of([0.25, 1.5, 2.0]), 2, SPEC, batched=False)
    assert (found.datatype, found.data.tolist()) == (Datatype.BYTES, [b"2.000000:2:dog", b"1.500000:1"])


def test_each_entry_of_a_batch_has_its_own() -> None:
    found = classify(of([[1, 2], [4, 3]], Datatype.INT32), 1, None, batched=True)
    assert found.data.tolist() == [[b"2:1"], [b"4:0"]]


def test_no_more_than_there_are() -> None:
    assert classify(of([[1.0, 2.0]]), 9, None, batched=True).shape == (1, 2)
    assert classify(of([]), 9, None, batched=False).shape == (0,)
    assert classify(InferTensor("y", Datatype.FP32, np.zeros((0, 4), np.float32)), 2, None, batched=True).shape == (
        0,
        2,
    )


def test_equal_values_keep_their_order_and_nan_is_last() -> None:
    found = classify(of([float("nan"), 1.0, 1.0]), 3, None, batched=False)
    assert found.data.tolist() == [b"1.000000:1", b"1.000000:2", b"nan:0"]


def test_what_cannot_be_classified_is_told_in_triton_s_words() -> None:
    with pytest.raises(
        InvalidRequestError, match="class result not available for output due to unsupported type 'BYTES'"
    ):
        classify(InferTensor("y", Datatype.BYTES, np.array([b"a"], np.object_)), 1, None, batched=False)
    with pytest.raises(InvalidRequestError, match="classification output tensor too large: 'y' has 1000001 elements"):
        classify(InferTensor("y", Datatype.FP32, np.zeros((1, 1_000_001), np.float32)), 1, None, batched=True)
