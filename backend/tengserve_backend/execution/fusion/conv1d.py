"""transformers' Conv1D, of GPT and GPT-2, as the linear layer that it is, so that its weight can be packed.

It keeps its weight as [in, out], and so is nothing that looks for linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from transformers.pytorch_utils import Conv1D

from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.replacing import Replacement, linear_over, replace_modules

_TRIED_ROWS = 3


def conv1ds_as_linears(model: torch.nn.Module, operators: FusedOperators) -> Iterator[Left | None]:
    """Replace every Conv1D by a linear layer, where linear layers are packed; see `replace_modules`."""
    packed = operators.packed_linear
    if packed is None:
        return iter(())
    return replace_modules(model, lambda module: _replacement(module, packed.dtypes, operators.is_fault))


@torch.no_grad()
def _replacement(
    module: torch.nn.Module, dtypes: Collection[torch.dtype], is_fault: Callable[[BaseException], bool]
) -> Replacement:
    if type(module) is not Conv1D:
        return None
    if module.weight.dtype not in dtypes:
        return Left("Conv1D", f"its weight is in {module.weight.dtype}")
    linear = linear_over(module.weight.t().contiguous(), module.bias)
    x = random_input(_TRIED_ROWS, linear.in_features, like=module.weight)
    reason = disagreement(lambda: module(x), lambda: linear(x), is_fault)
    return Left("Conv1D", reason) if reason else linear
