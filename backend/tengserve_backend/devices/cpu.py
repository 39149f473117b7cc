"""The CPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.cpu_threads import CpuThreads
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution import fusion
from tengserve_backend.execution.attention.cpu_paged import CpuPagedAttention
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.execution.fusion.onednn import onednn_operators
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.execution.sampling.greedy import greedy_by_chunks
from tengserve_backend.native.load import CpuLibrary
from tengserve_backend.native.operators import DTYPES, first_maxima, fused_operators
from tengserve_backend.scheduling.budget import StepTokens

_log = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_CACHE_SHARE = 0.25
_CACHE_TOKENS = 16384

# A token of a prompt costs as much in a step of 256 as in a longer one, so more would only let others wait.
_STEP_TOKENS = 256
# With these a step takes about three times as long as one without a prompt; `scripts/bench steps` tells.
_BESIDE_STREAMS = 128
_BESIDE_STREAMS_PLAIN = 64


class CpuDevice:
    """See DeviceBackend.

    Args:
        kernels: our operators, or the promise of them; a promise that came to nothing computes with what torch has
            packed for oneDNN, None with plain torch operators.
        threads: that an engine computes with; None leaves it to torch.
        quantization: of the models' linear layers. Only our operators compute with such weights, so that anything but
            none needs them to be there.
    """

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(
        self,
        kernels: Future[CpuLibrary | None] | None = None,
        threads: CpuThreads | None = None,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        self._threads = threads
        self._quantization = quantization
        self._finds_maxima = False
        if kernels is not None:
            kernels.add_done_callback(self._built)
        self._library = kernels.result() if kernels is not None and kernels.done() else None
        self._expected = kernels is not None and (self._library is not None or not kernels.done())
        # Whether our operators are there, or cannot be had.
        self._settled = kernels is not None and kernels.done()
        self._upgrade = None if kernels is None or kernels.done() else _upgraded(kernels, threads)

    def _built(self, kernels: Future[CpuLibrary | None]) -> None:
        self._finds_maxima = kernels.exception() is None and kernels.result() is not None

    def upgrade(self) -> Future[DeviceBackend] | None:
        """See DeviceBackend. It comes when the operators have been built, or cannot be."""
        return self._upgrade

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """bfloat16 where the CPU multiplies it in hardware and linear layers are packed, or will be; else float32.

        bfloat16 halves what a step reads, which is what a step takes its time for. Without the instructions it would be
        converted again and again.
        """
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        packed = self._settled or self._upgrade is not None
        return torch.bfloat16 if packed and fast else torch.float32

    def available_memory(self) -> int:
        """Free memory of the machine or of the container, whichever is less."""
        available = int(psutil.virtual_memory().available)
        limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
        return available

    def default_cache_memory(self) -> int:
        """A quarter of what is available: other models and other programs live here too."""
        return int(self.available_memory() * _CACHE_SHARE)

    def default_cache_tokens(self, longest: int) -> int:
        """See DeviceBackend. Enough for 32 conversations of 512 tokens, or for two sequences of any length allowed.

        The cache never shrinks, so whatever is more would only be taken from the machine for good.
        """
        return max(_CACHE_TOKENS, 2 * longest)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend. Operators that were built meanwhile count."""
        if self._finds_maxima and logits.dtype in DTYPES:
            return first_maxima(logits)
        return greedy_by_chunks(logits)

    def default_step_tokens(self) -> StepTokens:
        """See DeviceBackend; docs/performance.md has the curve that these come from."""
        return StepTokens(_STEP_TOKENS, _BESIDE_STREAMS if self._expected else _BESIDE_STREAMS_PLAIN)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See DeviceBackend. Any, for torch computes in all of them here; quantized weights want our operators."""
        if self._quantization is not Quantization.NONE and dtype not in DTYPES:
            raise ConfigurationError(
                f"quantization is {self._quantization.value!r}, which needs dtype auto, float32 or bfloat16"
            )

    def attention_tiers(self, needs: Collection[AttentionNeeds], dtype: torch.dtype) -> Sequence[AttentionTier]:
        """See DeviceBackend."""
        if self._library is None:
            return [PortableAttention()]
        if dtype not in DTYPES:
            _log.info("attention on the CPU is the portable one: the kernels do not compute in %s", dtype)
            return [PortableAttention()]
        return [CpuPagedAttention(), PortableAttention()]

    def fuse(self, model: Any, wanted: Collection[str]) -> Mapping[str, int]:
        """See DeviceBackend. Everything that there is: `wanted` is of NPUs."""
        if not self._settled:
            return {}
        quantized = self._quantization is not Quantization.NONE
        done = fusion.fuse(model, self._operators())
        self.release_memory()  # The weights that were packed leave holes.
        if quantized and not done.get("packed_linear"):
            raise ConfigurationError(
                f"quantization is {self._quantization.value!r}, but the model has no plain linear layers to quantize; "
                "set it to none"
            )
        if quantized:
            left = sum(parameter.numel() for parameter in model.parameters())
            _log.info(
                "linear layers are quantized to %s; %.1f million other weights stay as they are: embeddings, norms and "
                "what is no plain linear layer",
                self._quantization.value,
                left / 1e6,
            )
        return done

    def fuse_in_pieces(self, model: Any, run: Callable[[], object]) -> Generator[None, None, Mapping[str, int]]:
        """See DeviceBackend."""
        if not self._settled:
            return {}
        done = yield from fusion.fuse_in_pieces(model, self._operators(), run=run)
        self.release_memory()
        return done

    def _operators(self) -> FusedOperators:
        """Our own, else the best that torch has."""
        if self._library is None:
            return onednn_operators()
        return fused_operators(CpuPagedAttention(), self._quantization)

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Not asked: activations come out of the share that the cache leaves."""
        return 0

    def bind_thread(self) -> None:
        """See DeviceBackend: from here on it computes with as many threads as are meant to, where they are meant to."""
        if self._threads is not None:
            self._threads.bind()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return host

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend. torch's CPU allocator raises a plain RuntimeError."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        )

    def is_fault(self, error: BaseException) -> bool:
        """A CPU that is lost takes the process along."""
        return False

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend. The error says it itself."""
        return ""

    def release_memory(self) -> None:
        """Give the C library's free pages back to the system: tens of megabytes, in a millisecond or two."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own; musl and others have none.
        if trim is not None:
            trim(0)


def _upgraded(kernels: Future[CpuLibrary | None], threads: CpuThreads | None) -> Future[DeviceBackend]:
    """The device with what there is once our operators have been built, or could not be."""
    upgrade: Future[DeviceBackend] = Future()
    kernels.add_done_callback(lambda done: upgrade.set_result(CpuDevice(done, threads)))
    return upgrade


def _cgroup_number(name: str) -> int | None:
    """A control group's limit or use in bytes; None when there is none, or it says "max"."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None
