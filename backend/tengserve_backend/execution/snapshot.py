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

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """These numbers, a view of contiguous ones in one dimension."""
        # One operator, where a slice of another shape takes two.
        return numbers.as_strided(self.shape, self._strides, numbers.storage_offset() + self.start)

    @property
    def _strides(self) -> tuple[int, ...]:
        if len(self.shape) == 1:
            return (1,)
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


class Uploaded:
    """A snapshot on the device.

    Args:
        packed: int32; the integers, then the bits of the float32 numbers.
        integers: how many integers.
    """

    def __init__(self, packed: torch.Tensor, integers: int) -> None:
        self._packed = packed
        self._integers = integers
        self._int64: torch.Tensor | None = None

    def int32(self, piece: Piece) -> torch.Tensor:
        """Integers as they came."""
        return piece.of(self._packed)

    def int64(self, piece: Piece) -> torch.Tensor:
        """Integers as indices; all of the snapshot is widened at once, by the first who asks."""
        if self._int64 is None:
            self._int64 = self._packed.long()
        return piece.of(self._int64)

    def floats(self, piece: Piece) -> torch.Tensor:
        """float32 numbers."""
        return piece.of(self._packed[self._integers :].view(torch.float32))


class Snapshot:
    """A step's numbers until they are uploaded."""

    def __init__(self) -> None:
        self._integers = _Numbers(np.int32)
        self._floats = _Numbers(np.float32)

    def add_integers(
        self, values: Sequence[int] | NDArray[np.integer], *, shape: tuple[int, ...] | None = None
    ) -> Piece:
        """Integers below 2**31 in absolute value.

        Args:
            values: of any shape.
            shape: of the tensor; None leaves it as it is.
        """
        return self._integers.add(values, shape)

    def add_floats(self, values: Sequence[Sequence[float]] | NDArray[np.floating]) -> Piece:
        """Numbers of any shape, rounded to float32."""
        return self._floats.add(np.asarray(values), None)

    def upload(self, upload: Upload) -> Uploaded:
        """Send everything in one copy."""
        packed = integers = self._integers.together()
        if self._floats.count:
            packed = np.concatenate([integers, self._floats.together().view(np.int32)])
        return Uploaded(upload(torch.from_numpy(packed)), len(integers))


_Number = TypeVar("_Number", np.int32, np.float32)


class _Numbers(Generic[_Number]):
    def __init__(self, dtype: type[_Number]) -> None:
        self._dtype: type[_Number] = dtype
        self._parts: list[NDArray[_Number]] = []
        # Numbers of Python after the parts. Most steps bring nothing else, and not many of them: to make one array of
        # them all is several times cheaper than small ones.
        self._last: list[int] = []
        self.count = 0

    def add(self, values: Sequence[int] | NDArray[np.generic], shape: tuple[int, ...] | None) -> Piece:
        if isinstance(values, np.ndarray):
            self._close()
            self._parts.append(np.asarray(values, dtype=self._dtype).reshape(-1))
            piece = Piece(self.count, shape or values.shape)
            self.count += values.size
        else:
            self._last += values
            piece = Piece(self.count, shape or (len(values),))
            self.count += len(values)
        return piece

    def together(self) -> NDArray[_Number]:
        self._close()
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([np.zeros(0, self._dtype), *self._parts])

    def _close(self) -> None:
        if self._last:
            self._parts.append(np.array(self._last, dtype=self._dtype))
            self._last = []
