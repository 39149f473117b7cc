"""An Ascend NPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from tengserve_backend.devices.accelerator import Accelerator
from tengserve_backend.devices.npu import errors
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion import fuse
from tengserve_backend.devices.npu.operators import capabilities
from tengserve_backend.devices.npu.paged_attention import FusedPagedAttention, why_not
from tengserve_backend.devices.npu.versions import installed_versions
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier

_log = logging.getLogger(__name__)

_CACHE_SHARE: Final = 0.85


class NpuDevice(Accelerator):
    """See DeviceBackend. torch-npu is imported already, and `guard` found it usable.

    Args:
        index: which NPU, among those that the process sees.
    """

    def __init__(self, index: int) -> None:
        runtime = torch.npu  # type: ignore[attr-defined]  # torch-npu adds it, and torch's type information lacks it
        super().__init__("npu", index, runtime, cache_share=_CACHE_SHARE)
        # Loading runs on this thread.
        self.bind_thread()
        self.soc = str(self._runtime.get_device_name(index))
        self.family = NpuFamily.of(self.soc)
        has_bfloat16 = self.family.has_bfloat16
        self.has_bfloat16 = bool(self._runtime.is_bf16_supported()) if has_bfloat16 is None else has_bfloat16
        self._capabilities = capabilities()
        _log.info("%s is %s, %s, with %s", self.name, self.soc, self.family.value, installed_versions(os.environ))
        _log.info("operators of torch-npu: %s", self._capabilities)

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
        self._runtime.empty_cache()
        return done

    def bind_thread(self) -> None:
        """Make it this thread's device: the runtime's context is a thread's own (else "context is empty", 107002).

        Operators come from their compiled kernels; some chips would by default compile each new shape when it comes.
        """
        super().bind_thread()
        self._runtime.set_compile_mode(jit_compile=False)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return errors.is_out_of_memory(error)

    def is_fault(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return errors.is_fault(error)

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend."""
        return errors.explain(error)
