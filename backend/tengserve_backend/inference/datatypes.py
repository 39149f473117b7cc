"""The datatypes of the KServe v2 protocol, and the numpy dtypes that carry them."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt


class Datatype(enum.Enum):
    """Names as on the wire."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    # Members are what they are: Enum's own hash calls Python code, in each look-up of every tensor.
    __hash__ = object.__hash__

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What an array of this datatype has: object (of bytes) for BYTES, and for BF16 uint16 with its bits."""
        return _DTYPES[self]

    @property
    def itemsize(self) -> int | None:
        """Bytes an element takes on the wire; None for BYTES, whose elements carry their length."""
        return None if self is Datatype.BYTES else _DTYPES[self].itemsize

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt, such as TYPE_FP32."""
        return "TYPE_STRING" if self is Datatype.BYTES else f"TYPE_{self.value}"


_DTYPES: dict[Datatype, np.dtype[np.generic]] = {
    Datatype.BOOL: np.dtype(np.bool_),
    Datatype.UINT8: np.dtype(np.uint8),
    Datatype.UINT16: np.dtype(np.uint16),
    Datatype.UINT32: np.dtype(np.uint32),
    Datatype.UINT64: np.dtype(np.uint64),
    Datatype.INT8: np.dtype(np.int8),
    Datatype.INT16: np.dtype(np.int16),
    Datatype.INT32: np.dtype(np.int32),
    Datatype.INT64: np.dtype(np.int64),
    Datatype.FP16: np.dtype(np.float16),
    Datatype.FP32: np.dtype(np.float32),
    Datatype.FP64: np.dtype(np.float64),
    Datatype.BF16: np.dtype(np.uint16),
    Datatype.BYTES: np.dtype(np.object_),
}

Array = npt.NDArray[np.generic]
