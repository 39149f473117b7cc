"""Experts whose weights are one tensor for all of them, as one linear layer each, so that these can be packed.

transformers' mixture models keep the experts of a layer in modules of many classes and one form: what its decorator
`use_experts_implementation` says of them is enough to compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.replacing import Replacement, linear_over, replace_modules

# What the decorator tells, and what a module of that form can do.
_FORM = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel", "_apply_gate")
_TRIED_ROWS = 4
_TRIED_EXPERTS = 2


class LinearExperts(torch.nn.Module):
    """The experts of a layer, each asked for the tokens that were routed to it.

    Args:
        own: transformers' module, whose gate, activation and norm are used. Its weights are until `let_go` both its
            own and those of the layers here.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._names = ("gate_up_proj" if own.has_gate else "up_proj", "down_proj")
        self.own = own
        self.up_projs, self.down_projs = (
            torch.nn.ModuleList(_linears(own, name, own.is_transposed, own.has_bias)) for name in self._names
        )

    def let_go(self) -> None:
        """Leave the weights to the layers."""
        for name in list(self.own._parameters):
            delattr(self.own, name)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum of each token's experts, by their weights.

        Args:
            hidden_states: [T, hidden size].
            top_k_index: [T, k], the experts of a token.
            top_k_weights: [T, k].

        Returns:
            [T, hidden size].
        """
        own = self.own
        tokens, top_k = top_k_index.shape
        routed: dict[int, list[int]] = {}
        for pair, expert in enumerate(top_k_index.flatten().tolist()):
            routed.setdefault(expert, []).append(pair)
        answers: list[torch.Tensor] = []
        for expert, pairs in routed.items():
            x = hidden_states[[pair // top_k for pair in pairs]]
            x = self.up_projs[expert](x)
            x = own._apply_gate(x) if own.has_gate else own.act_fn(x)
            x = self.down_projs[expert](x)
            answers.append(own.post_expert_norm(x) if own.has_post_expert_norm else x)
        # In the order of the tokens again: each token's sum is then made the same way whoever is beside it.
        order = torch.tensor([pair for pairs in routed.values() for pair in pairs])
        each = torch.empty_like(joined := torch.cat(answers))
        each[order] = joined
        weighted = each * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def experts_as_linears(model: torch.nn.Module, operators: FusedOperators) -> Iterator[Left | None]:
    """Replace every module of experts in that form, where linear layers are packed; see `replace_modules`."""
    packed = operators.packed_linear
    if packed is None:
        return iter(())
    return replace_modules(model, lambda module: _replacement(module, packed.dtypes, operators.is_fault))


@torch.no_grad()
def _replacement(
    module: torch.nn.Module, dtypes: Collection[torch.dtype], is_fault: Callable[[BaseException], bool]
) -> Replacement:
    own: Any = module
    if not all(hasattr(own, name) for name in _FORM) or own._is_expert_parallel:
        return None
    up = "gate_up_proj" if own.has_gate else "up_proj"
    names = {up, "down_proj"} | ({f"{up}_bias", "down_proj_bias"} if own.has_bias else set())
    if own._parameters.keys() != names or own.down_proj.dim() != 3:
        return Left(type(module).__name__, "it has other weights than its kind")
    if own.down_proj.dtype not in dtypes:
        return Left(type(module).__name__, f"its weights are in {own.down_proj.dtype}")
    experts, size = own.down_proj.shape[0], own.down_proj.shape[2 if own.is_transposed else 1]
    x = random_input(_TRIED_ROWS, size, like=own.down_proj)
    routed = torch.arange(_TRIED_ROWS * _TRIED_EXPERTS).view(_TRIED_ROWS, -1) % experts
    weights = random_input(_TRIED_ROWS, _TRIED_EXPERTS, like=own.down_proj).abs()
    made: list[LinearExperts] = []

    def run() -> torch.Tensor:
        made.append(LinearExperts(own))
        answer: torch.Tensor = made[0](x, routed, weights)
        return answer

    if reason := disagreement(lambda: own(x, routed, weights), run, is_fault):
        return Left(type(module).__name__, reason)
    made[0].let_go()
    return made[0]


def _linears(own: Any, name: str, transposed: bool, biased: bool) -> Iterator[torch.nn.Linear]:
    """A layer for each expert, whose weight is a part of the one tensor."""
    biases = getattr(own, f"{name}_bias") if biased else None
    for expert, weight in enumerate(getattr(own, name).detach()):
        yield linear_over(weight.t() if transposed else weight, None if biases is None else biases[expert])
