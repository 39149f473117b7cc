"""Replacing modules within a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from tengserve_backend.devices.npu.fusion.agreement import Left


def replace_modules(
    model: torch.nn.Module, replacement: Callable[[torch.nn.Module], torch.nn.Module | Left | None]
) -> tuple[int, list[Left]]:
    """Put other modules in the place of some.

    Args:
        model: whose parts are replaced, in place.
        replacement: the module that takes a part's place, or why it stays, or None when nobody meant to replace it.
            Asked once for a module, however many places it has.

    Returns:
        How many modules were replaced, and which were left.
    """
    answers: dict[int, torch.nn.Module | Left | None] = {}
    kept: list[torch.nn.Module] = []  # A module that is gone would lend its id to another.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in answers:
                kept.append(child)
                answers[id(child)] = replacement(child)
            answer = answers[id(child)]
            if isinstance(answer, torch.nn.Module):
                parent.add_module(name, answer)
    left = [answer for answer in answers.values() if isinstance(answer, Left)]
    return sum(isinstance(answer, torch.nn.Module) for answer in answers.values()), left


def takes_one_argument(module: torch.nn.Module) -> bool:
    """Whether its forward takes one tensor and nothing else, not even by option."""
    return len(inspect.signature(module.forward).parameters) == 1
