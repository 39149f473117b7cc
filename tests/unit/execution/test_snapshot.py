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
