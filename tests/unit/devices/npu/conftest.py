from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.npu_operators import npu_operators


@pytest.fixture
def npu() -> Iterator[None]:
    """The fused operators, by reference functions on CPU tensors."""
    with npu_operators():
        yield
