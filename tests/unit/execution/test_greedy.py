"""The greedy choice, in each way that there is of it: always the first of the largest, or no token at all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cpu_kernels import kernels_device
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.execution.sampling.greedy import Greedy, greedy, greedy_by_chunks

WAYS: dict[str, Greedy] = {
    "torch": greedy,
    "by_chunks": greedy_by_chunks,
    "cpu": CpuDevice().greedy,
    "cpu_kernels": lambda logits: kernels_device().greedy(logits),
}
# With a chunk, without one, of whole registers and not.
WIDTHS = (1, 15, 16, 17, 640, 1023, 1024, 1025, 2048, 3 * 1024, 5001)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 7.0, 1e-40])


def first_largest(row: list[float]) -> int:
    if any(math.isnan(number) for number in row) or not math.isfinite(max(row)):
        return -1
    return row.index(max(row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 1000),
    changes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5000), SPECIAL), max_size=6),
)
def test_it_is_the_first_of_the_largest(
    way: str, dtype: torch.dtype, rows: int, width: int, seed: int, changes: list[tuple[int, int, float]]
) -> None:
    # Of few values, so that most rows have their largest several times.
    logits = torch.randint(-3, 4, (rows, width), generator=torch.Generator().manual_seed(seed)).to(dtype)
    for row, column, number in changes:
        logits[row % rows, column % width] = number
    assert WAYS[way](logits).tolist() == [first_largest(row) for row in logits.tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_minus_infinities_has_none(way: str) -> None:
    logits = torch.full((3, 2048), -math.inf)
    logits[1, 2047] = -1e38
    assert WAYS[way](logits).tolist() == [-1, 2047, -1]
