"""Sums in a fixed order of additions.

The sums that a library makes may depend on the shape of the whole batch, and with them the last bits. These are made
of element-wise additions only, so a row has the same bits alone and in every batch, on every device.
"""

from __future__ import annotations

import torch


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, whose size is a power of two: halves are added until one number is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def running(values: torch.Tensor) -> torch.Tensor:
    """Sums of the leading 1, 2, 3, ... entries of the last dimension: by doubling what each entry has summed."""
    distance = 1
    while distance < values.shape[-1]:
        added = values[..., distance:] + values[..., :-distance]
        values = torch.cat([values[..., :distance], added], dim=-1)
        distance *= 2
    return values


def before(sums: torch.Tensor) -> torch.Tensor:
    """From running sums: for each entry, the sum of those before it."""
    return torch.cat([torch.zeros_like(sums[..., :1]), sums[..., :-1]], dim=-1)
