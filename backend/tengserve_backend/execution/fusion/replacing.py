"""Replacing modules within a model, one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch

from tengserve_backend.execution.fusion.agreement import Left

Replacement = torch.nn.Module | Left | None
"""What takes a module's place, or why it stays, or None when nobody meant to replace it."""


def replace_modules(
    model: torch.nn.Module, replacement: Callable[[torch.nn.Module], Replacement]
) -> Iterator[Left | None]:
    """Put other modules in the place of some, in place.

    The model can run whenever this has yielded. A module that was replaced is let go before the next one is looked at.
    One that has hooks stays, and so does what it is within: they are somebody's, and would no longer be called.

    Args:
        model: whose parts are replaced.
        replacement: asked once for a module, however many places it has.

    Yields:
        for each module that somebody meant to replace: None when it was, else why it stays.
    """
    waiting = _places(model)
    while waiting:
        module, places = waiting.pop()
        answer = None if any(map(has_hooks, module.modules())) else replacement(module)
        del module  # Its memory must not wait for the next one's turn.
        if isinstance(answer, torch.nn.Module):
            for parent, name in places:
                parent.add_module(name, answer)
        if answer is not None:
            yield answer if isinstance(answer, Left) else None


def _places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[tuple[torch.nn.Module, str]]]]:
    """Every module within a model and where it stands: its parents, and its name in each; the first one comes last."""
    found: dict[int, tuple[torch.nn.Module, list[tuple[torch.nn.Module, str]]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            found.setdefault(id(child), (child, []))[1].append((parent, name))
    return list(reversed(found.values()))


def has_hooks(module: torch.nn.Module, *, but: type | tuple[()] = ()) -> bool:
    """Whether somebody is called before or after its forward, and would no longer be.

    Args:
        module: that is called.
        but: hooks of this class do not count.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not isinstance(hook, but) for hook in hooks)


def linear_over(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A linear layer of tensors that are there.

    Args:
        weight: [out, in].
        bias: [out].
    """
    outputs, inputs = weight.shape
    # On no device: its own weight would be allocated only to be dropped.
    linear = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def takes_one_argument(module: torch.nn.Module) -> bool:
    """Whether its forward takes one tensor and nothing else, not even by option."""
    return len(inspect.signature(module.forward).parameters) == 1
