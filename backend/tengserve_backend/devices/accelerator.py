"""What devices with memory of their own have in common: torch.cuda, and torch.npu after it, are called alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.execution.sampling.greedy import greedy
from tengserve_backend.scheduling.budget import StepTokens


class Accelerator:
    """The part of DeviceBackend that is the same for every such device; what else it asks for, a kind adds.

    Args:
        kind: as torch and the `device` setting call it.
        index: which of its kind, among those that the process sees.
        runtime: torch's module for the kind: torch.cuda, torch.npu.
        cache_share: how much of the memory that weights leave the KV cache may take; the activations' measured peak
            comes off it. The rest is for what nobody measures: workspaces of operators, streams, and fragmentation.
    """

    def __init__(self, kind: str, index: int, runtime: Any, *, cache_share: float) -> None:
        self.name = f"{kind}:{index}"
        self.torch_device = torch.device(kind, index)
        self._runtime = runtime
        self._cache_share = cache_share

    def upgrade(self) -> Future[DeviceBackend] | None:
        """Nothing is to come."""
        return None

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""
        free, total = self._runtime.mem_get_info(self.torch_device)
        return int(free), int(total)

    def available_memory(self) -> int:
        """Free device memory."""
        return self.memory()[0]

    def default_cache_memory(self) -> int:
        """Most of what the weights left."""
        return int(self.available_memory() * self._cache_share)

    def default_cache_tokens(self, longest: int) -> int | None:
        """As many as there is memory for: it is of no use to anybody else."""
        return None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend."""
        return greedy(logits)

    def default_step_tokens(self) -> StepTokens:
        """See DeviceBackend. Nobody has measured it on a card."""
        return StepTokens(2048, beside_streams=2048)

    def fuse_in_pieces(self, model: Any, run: Callable[[], object]) -> Generator[None, None, Mapping[str, int]]:
        """It is never an upgrade."""
        yield from ()
        return {}

    def measure_peak(self, run: Callable[[], None]) -> int:
        """See DeviceBackend."""
        runtime = self._runtime
        runtime.reset_peak_memory_stats(self.torch_device)
        run()
        runtime.synchronize(self.torch_device)
        peak = int(runtime.max_memory_allocated(self.torch_device) - runtime.memory_allocated(self.torch_device))
        runtime.empty_cache()
        return peak

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend. A blocking copy from pageable memory.

        An asynchronous one would read the host's memory later, when the next step has been written there. And a copy
        engine of its own may run it: on an NPU kernels of the same stream have been seen to read indices before they
        came, which ends in a lost device. Waiting for some kilobytes costs microseconds.
        """
        return host.to(self.torch_device)

    def bind_thread(self) -> None:
        """Make it this thread's device: the runtime's context is a thread's own."""
        self._runtime.set_device(self.torch_device)

    def release_memory(self) -> None:
        """Empty torch's cache; from whichever thread, which need not have used the device before."""
        self._runtime.set_device(self.torch_device)
        self._runtime.empty_cache()
