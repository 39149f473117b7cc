"""RMSNorm by one operator instead of six."""

from __future__ import annotations

import torch

from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.devices.npu.fusion.replacing import replace_modules, takes_one_argument


class FusedRmsNorm(torch.nn.Module):
    """x / sqrt(mean(x ** 2) + epsilon) * weight.

    Args:
        weight: [size]; shared with the module that this one replaces.
        epsilon: as above.
    """

    def __init__(self, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return operators.rms_norm(x, self.weight, epsilon=self.epsilon)


def fuse_rms_norms(model: torch.nn.Module) -> tuple[int, list[Left]]:
    """Replace every RMSNorm that the operator agrees with; see `replace_modules`."""
    return replace_modules(model, _replacement)


@torch.no_grad()
def _replacement(module: torch.nn.Module) -> torch.nn.Module | Left | None:
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
    fused = FusedRmsNorm(weight, epsilon)
    reason = disagreement(lambda: module(x), lambda: fused(x))
    return Left(kind, reason) if reason else fused
