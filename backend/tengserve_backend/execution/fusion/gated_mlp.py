"""Gated MLPs with SiLU: gate and up projection as one matrix product, and their activation by one operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch

from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators, Swiglu
from tengserve_backend.execution.fusion.replacing import Replacement, replace_modules, takes_one_argument

_SILU = frozenset({"SiLU", "SiLUActivation"})
# transformers keeps the two projections apart in most models, and together, gate first, in some.
_APART = frozenset({"gate_proj", "up_proj", "down_proj"})
_TOGETHER = frozenset({"gate_up_proj", "down_proj"})


class FusedGatedMlp(torch.nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        operator: that computes silu(gate) * up.
        gate_up: the two projections as one, gate first.
        down: the projection back.
    """

    def __init__(self, operator: Swiglu, gate_up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self._operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] to [..., hidden size]."""
        answer: torch.Tensor = self.down_proj(self._operator(self.gate_up_proj(x)))
        return answer


def fuse_gated_mlps(model: torch.nn.Module, operators: FusedOperators) -> Iterator[Left | None]:
    """Replace every gated MLP that the operator agrees with; see `replace_modules`."""
    operator = operators.swiglu
    if operator is None:
        return iter(())
    return replace_modules(model, lambda module: _replacement(module, operator, operators))


@torch.no_grad()
def _replacement(module: torch.nn.Module, operator: Swiglu, operators: FusedOperators) -> Replacement:
    children = dict(module.named_children())
    activation = children.get("act_fn", children.get("activation_fn"))
    if type(activation).__name__ not in _SILU or not takes_one_argument(module):
        return None
    linears = {name: child for name, child in children.items() if _is_plain(child)}
    if linears.keys() not in (_APART, _TOGETHER) or len(children) != len(linears) + 1:
        return None
    down = linears["down_proj"]
    x = random_input(1, 4, down.out_features, like=down.weight)
    # The module computes its answer before its weights move.
    fused: FusedGatedMlp | None = None

    def fuse_and_run() -> torch.Tensor:
        nonlocal fused
        gate_up = linears.get("gate_up_proj") or _merged(linears["gate_proj"], linears["up_proj"])
        fused = FusedGatedMlp(operator, gate_up, down)
        answer: torch.Tensor = fused(x)
        return answer

    reason = disagreement(lambda: module(x), fuse_and_run, operators.is_fault)
    return Left(type(module).__name__, reason) if reason else fused


def _is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Quantized or adapted layers are of derived classes: they compute something else with their weight."""
    return type(module) is torch.nn.Linear


def _merged(gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.nn.Linear:
    """Two linear layers as one. Their own weights become parts of the new one's, so that neither exists twice."""
    # On no device: its own weights would be allocated only to be dropped.
    merged = torch.nn.Linear(
        gate.in_features, gate.out_features + up.out_features, bias=gate.bias is not None, device="meta"
    )
    merged.weight = _joined(gate.weight, up.weight)
    if gate.bias is not None:
        merged.bias = _joined(gate.bias, up.bias)
    return merged


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.nn.Parameter:
    both = torch.nn.Parameter(torch.cat([first, second]), requires_grad=False)
    first.data, second.data = both.data[: len(first)], both.data[len(first) :]
    return both
