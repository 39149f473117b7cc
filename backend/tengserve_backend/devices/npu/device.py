"""An Ascend NPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.npu import errors
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion import fuse
from tengserve_backend.devices.npu.operators import capabilities
from tengserve_backend.devices.npu.paged_attention import FusedPagedAttention, why_not
from tengserve_backend.devices.npu.versions import installed_versions
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.execution.sampling.greedy import greedy
from tengserve_backend.scheduling.budget import StepTokens

_log = logging.getLogger(__name__)

_CACHE_SHARE = 0.85
"""Of the memory that weights leave; the activations' measured peak comes off it. The rest is for what nobody measures:
workspaces of operators, streams, and fragmentation."""


class NpuDevice:
    """See DeviceBackend. torch-npu is imported already, and `guard` found it usable.

    Args:
        index: which NPU, among those that the process sees.
    """

    def __init__(self, index: int) -> None:
        self.name = f"npu:{index}"
        self.torch_device = torch.device("npu", index)
        # Loading runs on this thread.
        self.bind_thread()
        self.soc = str(_npu().get_device_name(index))
        self.family = NpuFamily.of(self.soc)
        has_bfloat16 = self.family.has_bfloat16
        self.has_bfloat16 = bool(_npu().is_bf16_supported()) if has_bfloat16 is None else has_bfloat16
        self._capabilities = capabilities()
        _log.info("%s is %s, %s, with %s", self.name, self.soc, self.family.value, installed_versions(os.environ))
        _log.info("operators of torch-npu: %s", self._capabilities)

    def upgrade(self) -> Future[DeviceBackend] | None:
        """Nothing is to come."""
        return None

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """As stored for weights of half precision, and bfloat16 for any other; float16 where the chip has no bfloat16.

        float32 is exact but misses the chip's matrix unit and fused attention, so it is the operator's choice.
        """
        if checkpoint is torch.float16:
            return checkpoint
        if self.has_bfloat16:
            return torch.bfloat16
        if checkpoint is torch.bfloat16:
            _log.info("bfloat16 weights are converted to float16: %s has no bfloat16", self.soc)
        return torch.float16

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See DeviceBackend."""
        if dtype is torch.bfloat16 and not self.has_bfloat16:
            raise ConfigurationError(
                f"dtype is bfloat16, which {self.name} ({self.soc}) does not compute in; use auto or float16"
            )

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""
        free, total = _npu().mem_get_info(self.torch_device)
        return int(free), int(total)

    def available_memory(self) -> int:
        """Free device memory."""
        return self.memory()[0]

    def default_cache_memory(self) -> int:
        """Most of what the weights left."""
        return int(self.available_memory() * _CACHE_SHARE)

    def default_cache_tokens(self, longest: int) -> int | None:
        """As many as there is memory for: it is of no use to anybody else."""
        return None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend."""
        return greedy(logits)

    def default_step_tokens(self) -> StepTokens:
        """See DeviceBackend. As on CUDA; nobody has measured it on a card."""
        return StepTokens(2048, beside_streams=2048)

    def attention_tiers(self, needs: Collection[AttentionNeeds], dtype: torch.dtype) -> Sequence[AttentionTier]:
        """See DeviceBackend."""
        reasons = {why_not(each, family=self.family, dtype=dtype, found=self._capabilities) for each in needs} - {""}
        if reasons:
            _log.info("attention on %s is the portable one: %s", self.name, "; ".join(sorted(reasons)))
            return [PortableAttention()]
        return [FusedPagedAttention(self.torch_device), PortableAttention()]

    def fuse(self, model: Any, wanted: Collection[str]) -> Mapping[str, int]:
        """See DeviceBackend."""
        done = fuse(model, wanted=wanted, family=self.family, found=self._capabilities)
        # Projections that became one leave holes, which would count as used when the KV cache is sized.
        _npu().empty_cache()
        return done

    def fuse_in_pieces(self, model: Any, run: Callable[[], object]) -> Generator[None, None, Mapping[str, int]]:
        """It is never an upgrade."""
        yield from ()
        return {}

    def measure_peak(self, run: Callable[[], None]) -> int:
        """See DeviceBackend."""
        npu = _npu()
        npu.reset_peak_memory_stats(self.torch_device)
        run()
        npu.synchronize(self.torch_device)
        peak = int(npu.max_memory_allocated(self.torch_device) - npu.memory_allocated(self.torch_device))
        npu.empty_cache()
        return peak

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend. A blocking copy from pageable memory.

        An asynchronous one would read the host's memory later, when the next step has been written there. And a copy
        engine of its own may run it: kernels of the same stream have been seen to read indices before they came, which
        ends in a lost device. Waiting for some kilobytes costs microseconds.
        """
        return host.to(self.torch_device)

    def bind_thread(self) -> None:
        """Make it this thread's device: the runtime's context is a thread's own (else "context is empty", 107002).

        Operators come from their compiled kernels; some chips would by default compile each new shape when it comes.
        """
        npu = _npu()
        npu.set_device(self.torch_device)
        npu.set_compile_mode(jit_compile=False)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return errors.is_out_of_memory(error)

    def is_fault(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return errors.is_fault(error)

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend."""
        return errors.explain(error)

    def release_memory(self) -> None:
        """Empty torch's cache; from whichever thread, which need not have used the device before."""
        npu = _npu()
        npu.set_device(self.torch_device)
        npu.empty_cache()


def _npu() -> Any:
    """torch.npu, which torch-npu adds."""
    return torch.npu  # type: ignore[attr-defined]
