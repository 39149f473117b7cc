"""RMSNorm by one operator instead of six."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators, RmsNorm
from tengserve_backend.execution.fusion.replacing import Replacement, replace_modules, takes_one_argument


class FusedRmsNorm(torch.nn.Module):
    """x / sqrt(mean(x ** 2) + epsilon) * weight.

    Args:
        operator: that computes it.
        weight: [size]; shared with the module that this one replaces.
        epsilon: as above.
    """

    def __init__(self, operator: RmsNorm, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon
        self._operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return self._operator(x, self.weight, self.epsilon)


def fuse_rms_norms(model: torch.nn.Module, operators: FusedOperators) -> Iterator[Left | None]:
    """Replace every RMSNorm that the operator agrees with; see `replace_modules`."""
    operator = operators.rms_norm
    if operator is None:
        return iter(())
    return replace_modules(model, lambda module: _replacement(module, operator, operators))


@torch.no_grad()
def _replacement(module: torch.nn.Module, operator: RmsNorm, operators: FusedOperators) -> Replacement:
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "rmsnorm" not in kind.lower() or not takes_one_argument(module):
        return None
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    x = random_input(2, 4, weight.shape[0], like=weight)
    # Small rows show which epsilon is added, and where.
    x[1] *= 1e-3
    fused = FusedRmsNorm(operator, weight, epsilon)
    reason = disagreement(lambda: module(x), lambda: fused(x), operators.is_fault)
    return Left(kind, reason) if reason else fused
