"""What one step sends to the device: written on the host piece by piece, uploaded as one tensor of int32.

A copy to a device costs about the same whatever its size, and many small ones are what makes a step wait. So whoever
needs numbers on the device in a step adds them here before the step runs, and reads them from the upload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies a host tensor to the device. The host's memory may be written again as soon as it returns."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where some numbers lie among those of their kind.

    Attributes:
        start: of the first.
        shape: of the tensor that they make.
    """

    start: int
    shape: tuple[int, ...]

    @property
    def _end(self) -> int:
        return self.start + math.prod(self.shape)

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """These numbers, a view."""
        return numbers[self.start : self._end].view(self.shape)


class Uploaded:
    """A snapshot on the device.

    Args:
        packed: int32; the integers, then the bits of the float32 numbers.
        integers: how many integers.
    """

    def __init__(self, packed: torch.Tensor, integers: int) -> None:
        self._int32 = packed[:integers]
        self._floats = packed[integers:].view(torch.float32)
        self._int64: torch.Tensor | None = None

    def int32(self, piece: Piece) -> torch.Tensor:
        """Integers as they came."""
        return piece.of(self._int32)

    def int64(self, piece: Piece) -> torch.Tensor:
        """Integers as indices; all of the snapshot are widened at once, by the first who asks."""
        if self._int64 is None:
            self._int64 = self._int32.to(torch.int64)
        return piece.of(self._int64)

    def floats(self, piece: Piece) -> torch.Tensor:
        """float32 numbers."""
        return piece.of(self._floats)


class Snapshot:
    """A step's numbers until they are uploaded."""

    def __init__(self) -> None:
        self._integers = _Numbers(np.int32)
        self._floats = _Numbers(np.float32)

    def add_integers(self, values: Sequence[int] | NDArray[np.integer]) -> Piece:
        """Integers below 2**31 in absolute value, of any shape."""
        return self._integers.add(np.asarray(values))

    def add_floats(self, values: Sequence[Sequence[float]] | NDArray[np.floating]) -> Piece:
        """Numbers of any shape, rounded to float32."""
        return self._floats.add(np.asarray(values))

    def upload(self, upload: Upload) -> Uploaded:
        """Send everything in one copy."""
        integers = self._integers.together()
        packed = np.concatenate([integers, self._floats.together().view(np.int32)])
        return Uploaded(upload(torch.from_numpy(packed)), len(integers))


_Number = TypeVar("_Number", np.int32, np.float32)


class _Numbers(Generic[_Number]):
    def __init__(self, dtype: type[_Number]) -> None:
        self._dtype: type[_Number] = dtype
        self._parts: list[NDArray[_Number]] = []
        self._count = 0

    def add(self, values: NDArray[np.generic]) -> Piece:
        piece = Piece(self._count, values.shape)
        self._parts.append(np.asarray(values, dtype=self._dtype).reshape(-1))
        self._count += values.size
        return piece

    def together(self) -> NDArray[_Number]:
        return np.concatenate([np.zeros(0, self._dtype), *self._parts])
