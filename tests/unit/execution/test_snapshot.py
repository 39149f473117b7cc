"""A step's numbers go up in one copy and come back as they went."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tengserve_backend.execution.snapshot import Snapshot


def test_everything_goes_up_in_one_copy_of_int32():
    copies: list[torch.Tensor] = []

    def upload(host: torch.Tensor) -> torch.Tensor:
        copies.append(host)
        return host.clone()

    snapshot = Snapshot()
    ids = snapshot.add_integers([5, 6, 7])
    numbers = snapshot.add_floats([[0.5, -1.25], [float("inf"), 3e-30]])
    table = snapshot.add_integers(np.array([[1, 2], [3, 2**31 - 1]]))
    uploaded = snapshot.upload(upload)
    (copy,) = copies
    assert copy.dtype is torch.int32
    assert uploaded.int64(ids).tolist() == [5, 6, 7]
    assert uploaded.int64(ids).dtype is torch.int64
    assert uploaded.int32(table).tolist() == [[1, 2], [3, 2**31 - 1]]
    assert uploaded.floats(numbers).tolist() == [[0.5, -1.25], [float("inf"), pytest.approx(3e-30)]]


def test_a_snapshot_may_be_empty():
    snapshot = Snapshot()
    nothing = snapshot.add_integers(np.zeros((0,), dtype=np.int32))
    assert snapshot.upload(torch.clone).int64(nothing).shape == (0,)


def test_integers_come_in_another_shape_and_beside_arrays():
    snapshot = Snapshot()
    pair = snapshot.add_integers([1, 2], shape=(1, 2))
    array = snapshot.add_integers(np.array([3, 4, 5], dtype=np.int64))
    none = snapshot.add_integers([])
    table = snapshot.add_integers([6, 7, 8, 9, 10, 11], shape=(3, 2))
    half = snapshot.add_floats([[0.5]])
    uploaded = snapshot.upload(torch.clone)
    for read in (uploaded.int32, uploaded.int64):
        assert read(pair).tolist() == [[1, 2]]
        assert read(array).tolist() == [3, 4, 5]
        assert read(none).tolist() == []
        assert read(table).tolist() == [[6, 7], [8, 9], [10, 11]]
        assert read(table).is_contiguous()
    assert uploaded.floats(half).tolist() == [[0.5]]


def test_an_upload_may_be_a_part_of_something_larger():
    snapshot = Snapshot()
    ids = snapshot.add_integers([5, 6])
    number = snapshot.add_floats([[0.5]])
    uploaded = snapshot.upload(lambda host: torch.cat([torch.zeros(7, dtype=torch.int32), host])[7:])
    assert uploaded.int32(ids).tolist() == [5, 6]
    assert uploaded.floats(number).tolist() == [[0.5]]
