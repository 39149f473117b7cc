"""Tensors as a user's model sees them, and their way to and from those of the server."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from tengserve_backend.inference import Datatype, InferTensor
from tengserve_backend.inference.datatypes import Array
from tengserve_backend.python_backend.api.errors import TritonModelException

_DATATYPES = {datatype.dtype: datatype for datatype in Datatype if datatype is not Datatype.BF16}
_NAMES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"
TRITON_TYPES = tuple(map(Datatype, _NAMES.split()))
"""In the order of Triton's numbers, which begin with 1."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
"""How Python shows objects that do not say how."""

_CPU = 1
"""DLPack's device type."""


class _Capsule:
    """A DLPack capsule as an object that exports one."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


class Tensor:
    """A named array on the CPU.

    Args:
        name: of an input or output.
        numpy_array: BYTES tensors are arrays of objects, each bytes or something that `str` turns into text.
    """

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor takes a numpy array, not {type(numpy_array).__name__}")
        self._set(name, numpy_array)

    def _set(self, name: str, array: Array, datatype: Datatype | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError("Tensor takes a name of type str")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if datatype is None:
            datatype = Datatype.BYTES if array.dtype.kind in "SU" else _DATATYPES.get(array.dtype)
        if datatype is None:
            raise TritonModelException(f"Tensor '{name}' has the dtype {array.dtype}, which no datatype of Triton has.")
        self._name, self._array, self._datatype = name, array, datatype

    @classmethod
    def from_infer(cls, tensor: InferTensor) -> Tensor:
        """Of a request; not part of the API."""
        made = cls.__new__(cls)
        made._set(tensor.name, tensor.data, tensor.datatype)
        return made

    def to_infer(self) -> InferTensor:
        """A copy for the server, as the model may go on with its array; not part of the API.

        Raises:
            TritonModelException: an element of BYTES has no text.
        """
        if self._datatype is Datatype.BYTES:
            data: Array = np.empty(self._array.shape, np.object_)
            data.reshape(-1)[:] = [self._as_bytes(element) for element in self._array.reshape(-1).tolist()]
            data.flags.writeable = False
        else:
            # In bytes, which are sent as they are.
            data = np.ndarray(self._array.shape, self._array.dtype, self._array.tobytes())
        return InferTensor(self._name, self._datatype, data)

    def name(self) -> str:
        """Of the input or output."""
        return self._name

    def as_numpy(self) -> Array:
        """The array, which the model may change.

        Raises:
            TritonModelException: the tensor is BF16, which numpy has not.
        """
        if self._datatype is Datatype.BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._writeable()

    def triton_dtype(self) -> int:
        """Triton's number of the datatype."""
        return TRITON_TYPES.index(self._datatype) + 1

    def shape(self) -> list[int]:
        """Dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Always: what comes from a device by DLPack is copied."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule.

        Raises:
            TritonModelException: the tensor is BYTES; or BF16, and torch is not installed.
        """
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._datatype is Datatype.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array: Any = self._writeable()
        if self._datatype is Datatype.BF16:
            torch = _torch()
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).__dlpack__()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """A tensor of what another library made.

        Args:
            name: of the input or output.
            tensor: an object with `__dlpack__`, or a capsule.

        Raises:
            TritonModelException: it is none, or its elements are not in one row-major block.
        """
        made = cls.__new__(cls)
        if isinstance(tensor, Tensor):
            made._set(name, tensor._array, tensor._datatype)
            return made
        if type(tensor).__name__ == "PyCapsule":
            tensor = _Capsule(tensor)
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
                "`__dlpack_device__` attributes"
            )
        array, datatype = _import_dlpack(tensor)
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        made._set(name, array, datatype)
        return made

    def _as_bytes(self, element: object) -> bytes:
        if isinstance(element, bytes):
            return element
        text = str(element)
        # Triton sends whatever `str` makes; of an object without a text of its own that is where it lies in memory.
        if not isinstance(element, str) and _ADDRESS.search(text):
            raise TritonModelException(
                f"Tensor '{self._name}' has an element of type {type(element).__name__}, neither bytes nor text."
            )
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            raise TritonModelException(f"Tensor '{self._name}' has an element that is no Unicode text.") from None

    def _writeable(self) -> Array:
        if not self._array.flags.writeable:
            # It is the client's body, or another model's; made our own only for who looks at it.
            self._array = self._array.copy()
        return self._array


def _torch() -> Any:
    """torch, which the model that makes BF16 tensors has; imported only then."""
    try:
        import torch
    except ImportError:
        raise TritonModelException("BF16 tensors need torch, which is not installed.") from None
    return torch


def _import_dlpack(tensor: Any) -> tuple[Array, Datatype | None]:
    loaded = sys.modules.get("torch")
    if loaded is None and not isinstance(tensor, _Capsule) and tensor.__dlpack_device__()[0] == _CPU:
        try:
            return np.from_dlpack(tensor), None
        except (BufferError, RuntimeError, TypeError):
            pass  # numpy has no such datatype, or the exporter speaks another version: torch may know better.
    torch = loaded or _torch()
    if isinstance(tensor, torch.Tensor):
        made = tensor.detach()
    elif isinstance(tensor, _Capsule):
        made = torch.utils.dlpack.from_dlpack(tensor.__dlpack__())
    else:
        made = torch.from_dlpack(tensor)
    made = made.cpu()
    if made.dtype == torch.bfloat16:
        return made.view(torch.int16).numpy().view(np.uint16), Datatype.BF16
    return made.numpy(), None
