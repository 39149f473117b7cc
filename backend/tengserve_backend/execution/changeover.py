"""Going over to a device's faster way while a model serves: what was not built yet when it was loaded has been built.

All of it happens on the engine's thread between two steps, in pieces, so that no stream stops for long. At each yield
the model runs, partly in the old way and partly in the new one: each part gives the same answer in both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.execution.choose import ForwardChoice, choose_attention
from tengserve_backend.execution.forward import ModelForward, compute
from tengserve_backend.execution.fusion import told
from tengserve_backend.execution.packed import PackedForward

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model that serves.

    Attributes:
        name: for the log.
        model: the transformers model.
        forward: runs it.
        choice: how it was loaded.
        dtype, vocab_size: as `choose_forward` got them.
        portable: its attention stays the portable one.
    """

    name: str
    model: Any
    forward: ModelForward
    choice: ForwardChoice
    dtype: torch.dtype
    vocab_size: int
    portable: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """What a model has gone over to.

    Attributes:
        attention_tier: how it attends.
        fused: names of the fusions that replaced parts of it.
    """

    attention_tier: str
    fused: tuple[str, ...]


def change_over(
    running: RunningModel, device: DeviceBackend, blocks: Callable[[], Sequence[int]]
) -> Generator[None, None, Changed]:
    """Use what a device has got meanwhile.

    Args:
        running: on the device as it was.
        device: as it is now.
        blocks: cache blocks that hold something, asked when it matters.

    Returns:
        How the model runs from then on.
    """
    forward = running.forward

    @torch.inference_mode()
    def run() -> None:
        step = forward.probe_step()
        compute(forward, step, device.upload)
        for part in step.sequences:
            forward.release(part.seq_id)

    fused = yield from device.fuse_in_pieces(running.model, run)
    _log.info("model %s goes over to fused operators: %s", running.name, told(fused) or "none")
    if isinstance(forward, PackedForward) and not running.portable:
        tier = choose_attention(
            running.choice, running.model, device, vocab_size=running.vocab_size, dtype=running.dtype
        )
        yield
        if tier.name != forward.tier:
            forward.change_attention(tier, blocks())
            _log.info("model %s goes over to attention %s", running.name, tier.name)
    return Changed(forward.tier, tuple(fused))
