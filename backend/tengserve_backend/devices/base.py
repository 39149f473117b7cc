"""What an engine needs to know of a device; the code above sees plain torch besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.scheduling.budget import StepTokens


class DeviceBackend(Protocol):
    """One device of one kind."""

    @property
    def name(self) -> str:
        """As in the `device` setting, resolved: cpu, cuda:0."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""
        ...

    def upgrade(self) -> Future[DeviceBackend] | None:
        """What the same device will be while models run on it: faster, once something is built for it.

        None when nothing is to come.
        """
        ...

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """What `dtype: auto` means here for weights stored in this dtype."""
        ...

    def available_memory(self) -> int:
        """Bytes that could be used now without hurting anybody, container limits included."""
        ...

    def default_cache_memory(self) -> int:
        """Bytes of KV cache at most when the operator set nothing, weights being loaded already."""
        ...

    def default_cache_tokens(self, longest: int) -> int | None:
        """Tokens of KV cache at most when the operator set nothing; None when memory alone says how many.

        Args:
            longest: tokens of a sequence as long as the settings allow.
        """
        ...

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The fastest Greedy (execution/sampling/greedy.py) that there is here now."""
        ...

    def default_step_tokens(self) -> StepTokens:
        """Tokens of a step when the operator set nothing: what keeps the gap between two tokens short."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that the operator asked for and that this device cannot compute in.

        Raises:
            ConfigurationError: it cannot.
        """
        ...

    def attention_tiers(self, needs: Collection[AttentionNeeds], dtype: torch.dtype) -> Sequence[AttentionTier]:
        """Ways to compute attention here that can serve every kind of a model's layers.

        The preferred one comes first, the portable one last. Why another one is not offered goes to the log.
        """
        ...

    def fuse(self, model: Any, wanted: Collection[str]) -> Mapping[str, int]:
        """Replace parts of a loaded model by this device's fused operators; how many, by the fusion's name.

        Args:
            model: on this device.
            wanted: of the names in the setting npuFusions.
        """
        ...

    def fuse_in_pieces(self, model: Any, run: Callable[[], object]) -> Generator[None, None, Mapping[str, int]]:
        """`fuse` for a model that runs, on a device that came as an upgrade: the model can run at each yield.

        Args:
            model: on this device.
            run: runs it on anything.
        """
        ...

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Bytes of device memory that a call needs while it runs, beyond what it leaves behind.

        0 where memory is not the device's own; then nothing has to run.
        """
        ...

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy to the device. The host's memory may be written again as soon as this returns."""
        ...

    def bind_thread(self) -> None:
        """Called once on the engine's thread before anything else."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the device ran out of memory, so that a smaller batch may succeed."""
        ...

    def is_fault(self, error: BaseException) -> bool:
        """Whether the device is lost: nothing that this process tries on it can succeed any more."""
        ...

    def explain(self, error: BaseException) -> str:
        """What an error of the device means and what to do, for the log; "" when that is not known."""
        ...

    def release_memory(self) -> None:
        """Give cached memory back after a model is gone."""
        ...
