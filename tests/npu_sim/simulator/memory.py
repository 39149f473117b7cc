"""Tensors of the simulated device and tensors of the host over the same memory."""

from __future__ import annotations

import torch

_HOST = torch.device("cpu")


def on_device(value: object) -> bool:
    """Whether it is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor over the memory of a device tensor: what one writes the other shows. It keeps nothing alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_HOST)
    shared = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _HOST, size)
    over = torch.empty(0, dtype=tensor.dtype, device=_HOST)
    return over.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new device tensor with what a kernel has computed: same values, same strides, no copy that anybody counts."""
    if not _is_dense(tensor):
        tensor = tensor.contiguous()
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(result).copy_(tensor)
    return result


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
