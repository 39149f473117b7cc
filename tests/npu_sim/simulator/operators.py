"""What the kernels need to know about single operators."""

from __future__ import annotations

# The wheel's own kernels stay: they allocate, look or rearrange without computing, or, like attention, they choose
# among operators by the chip, and that choice is part of what is to be tested.
KEPT = frozenset(
    f"aten::{name}"
    for name in (
        "_pin_memory",
        "_reshape_alias",
        "empty.memory_format",
        "empty_like",
        "empty_strided",
        "is_pinned",
        "is_set_to",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "resize_as_",
        "scaled_dot_product_attention",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
    )
) | frozenset(
    f"npu::{name}"
    for name in (
        "empty_with_format",
        "empty_with_swapped_memory",
        "get_npu_format",
        "get_storage_size",
        "unsafe_empty_with_format",
    )
)

# Tensors of the host may be among their arguments.
MIXING = frozenset(("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))

# The size of the result depends on values: the host has to wait for them.
READING = frozenset(
    f"aten::{name}"
    for name in (
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "masked_select",
        "masked_select.out",
        "nonzero",
        "nonzero.out",
        "repeat_interleave.Tensor",
        "repeat_interleave.self_Tensor",
        "unique_consecutive",
        "unique_dim",
    )
)

# With a boolean index, the same.
INDEXING = frozenset(("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))
