"""Who reads a weight: what only its own module reads may be let go once the module is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Watched(torch.nn.Module):
    """In front of a module's own class: remembers the modules whose weight others read."""

    read: set[int]
    _computing = False

    @property
    def weight(self) -> Any:
        if not self._computing:
            self.read.add(id(self))
        return self._parameters["weight"]

    def forward(self, x: torch.Tensor) -> Any:
        self._computing = True
        try:
            return super().forward(x)
        finally:
            self._computing = False


@torch.no_grad()
def weights_read(modules: Iterable[torch.nn.Module], run: Callable[[], object]) -> frozenset[int]:
    """Those modules, by id, whose weight is read by other code while the model runs.

    Args:
        modules: of the model; each has a parameter `weight` and a forward of one tensor.
        run: runs the model on anything.
    """
    own = [(module, type(module)) for module in modules]
    read: set[int] = set()
    watched = {kind: type(f"Watched{kind.__name__}", (_Watched, kind), {"read": read}) for _, kind in own}
    try:
        for module, kind in own:
            module.__class__ = watched[kind]
        run()
    finally:
        for module, kind in own:
            module.__class__ = kind
            module.__dict__.pop("_computing", None)
    return frozenset(read)
