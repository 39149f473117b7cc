"""An embedding whose weight is also the last layer's reads its rows from the packed one: the weight is there once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tengserve_backend.execution.fusion.agreement import Left
from tengserve_backend.execution.fusion.linears import PackedLinear
from tengserve_backend.execution.fusion.operators import FusedOperators, PackedRows
from tengserve_backend.execution.fusion.replacing import Replacement, has_hooks, replace_modules
from tengserve_backend.execution.fusion.watching import weights_read

_log = logging.getLogger(__name__)

_COMPARED_ROWS = 4096


class PackedEmbedding(torch.nn.Module):
    """torch.nn.Embedding, but for its weight.

    Args:
        rows: reads them.
        packed: the weight as a linear layer has it; shared with that one.
        own: the embedding that this one replaces.
    """

    def __init__(self, rows: PackedRows, packed: torch.Tensor, own: torch.nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = own.weight.shape
        # One number that says it is none: of the weight others may want to know its shape, its type and where it is.
        self.weight = torch.nn.Parameter(
            own.weight.new_full((1, 1), torch.nan).expand(own.weight.shape), requires_grad=False
        )
        self._rows = rows
        self._packed = packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., embedding_dim]."""
        return self._rows(self._packed, ids, self.embedding_dim)


def share_embeddings(
    model: torch.nn.Module, operators: FusedOperators, run: Callable[[], object]
) -> Iterator[Left | None]:
    """Replace every embedding whose weight is, bit for bit, that of a packed linear layer.

    One whose weight other code reads, past the embedding itself, stays as it is: running the model shows it.

    Args:
        model: whose embeddings are replaced, after its linear layers.
        operators: of the device.
        run: runs the model on anything.

    Yields:
        as `replace_modules`.
    """
    rows = operators.packed_rows
    if rows is None:
        return
    heads = [module for module in model.modules() if isinstance(module, PackedLinear)]
    read = weights_read(filter(_is_plain, model.modules()), run)

    def replacement(module: torch.nn.Module) -> Replacement:
        if not _is_plain(module):
            return None
        own: Any = module
        head = next((head for head in heads if _is_same(rows, head, own.weight)), None)
        if head is None:
            return None
        if id(module) in read:
            return Left("Embedding", "other code reads its weight, which is the last layer's too and so is there twice")
        size = own.weight.nbytes / 2**20
        _log.info("the embedding reads its rows from the packed head: its own %.0f MiB are let go", size)
        return PackedEmbedding(rows, head.packed, own)

    yield from replace_modules(model, replacement)


def _is_plain(module: torch.nn.Module) -> bool:
    """Those of derived classes do more than look up, and hooks belong to somebody."""
    return type(module) is torch.nn.Embedding and module.max_norm is None and not has_hooks(module)


@torch.no_grad()
def _is_same(rows: PackedRows, head: PackedLinear, weight: torch.Tensor) -> bool:
    count, size = weight.shape
    if (head.out_features, head.in_features, head.packed.dtype) != (count, size, weight.dtype):
        return False
    ids = torch.arange(count)
    parts = (slice(first, first + _COMPARED_ROWS) for first in range(0, count, _COMPARED_ROWS))
    return all(torch.equal(rows(head.packed, ids[part], size), weight[part]) for part in parts)
