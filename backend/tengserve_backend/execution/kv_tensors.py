"""The KV cache as tensors: per layer one of keys and one of values, a slot a token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps for a token; seen at its first call, for configurations do not always tell.

    Attributes:
        heads: key and value heads.
        key_dim, value_dim: elements a head; they may differ.
    """

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Cache memory of one token."""
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages.

    Attributes:
        keys: [slots, heads, key_dim], contiguous.
        values: [slots, heads, value_dim], contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor


class PagedKVCache:
    """Pages of all layers. Block b holds slots b * block_size to (b + 1) * block_size - 1.

    One more block, `scratch_block`, belongs to no sequence.
    Memory of a layer is reserved by `reserve` or at its first use, and touched by the system as slots fill.

    Args:
        total_blocks, block_size: as in the BlockPool whose numbers are used here.
        dtype, device: of the tensors.
    """

    def __init__(self, *, total_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.scratch_block = total_blocks
        self._slots = (total_blocks + 1) * block_size
        self._dtype = dtype
        self._device = device
        self._layers: dict[int, LayerCache] = {}
        self._together: dict[tuple[int, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Layers seen so far, by index."""
        return {
            index: LayerShape(layer.keys.shape[1], layer.keys.shape[2], layer.values.shape[2])
            for index, layer in self._layers.items()
        }

    @property
    def layers(self) -> Collection[LayerCache]:
        """Pages of all layers so far."""
        return self._layers.values()

    def layer(self, layer_idx: int, shape: LayerShape) -> LayerCache:
        """A layer's pages, made at its first use."""
        layer = self._layers.get(layer_idx)
        if layer is None:
            layer = self._new_layer(shape)
            self._layers[layer_idx] = layer
        return layer

    def tensors(self, indices: tuple[int, ...], shape: LayerShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of layers of one shape, in their order, for reading: the lists are the same at each call."""
        found = self._together.get(indices)
        if found is None:
            layers = [self.layer(index, shape) for index in indices]
            found = [layer.keys for layer in layers], [layer.values for layer in layers]
            self._together[indices] = found
        return found

    def reserve(self, shapes: Mapping[int, LayerShape]) -> None:
        """Reserve the memory of layers before their first use, so that a lack of it shows at once."""
        self._together.clear()
        for layer_idx, shape in shapes.items():
            self._layers[layer_idx] = self._new_layer(shape)

    def _new_layer(self, shape: LayerShape) -> LayerCache:
        return LayerCache(
            keys=torch.empty((self._slots, shape.heads, shape.key_dim), dtype=self._dtype, device=self._device),
            values=torch.empty((self._slots, shape.heads, shape.value_dim), dtype=self._dtype, device=self._device),
        )
