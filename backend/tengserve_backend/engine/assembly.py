"""Joins the parts of a native engine around a forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.loop import EngineLoop
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.execution.forward import ModelForward
from tengserve_backend.execution.runner import Runner
from tengserve_backend.execution.step_profile import StepClock
from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.scheduling.admission import Admission
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.scheduler import Scheduler, SchedulerLimits
from tengserve_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much an engine holds.

    Attributes:
        steps: what one step may hold.
        total_blocks: of the KV cache; their size is the forward's.
        max_waiting_requests: requests that wait while `steps.max_running` others run.
        max_waiting_tokens: prompt tokens that wait.
        prefix_caching: whether requests share the blocks of equal beginnings.
    """

    steps: SchedulerLimits
    total_blocks: int
    max_waiting_requests: int
    max_waiting_tokens: int
    prefix_caching: bool = True


def assemble(
    *,
    forward: ModelForward,
    info: ModelInfo,
    defaults: ModelDefaults,
    tokenizer: Tokenizer,
    device: DeviceBackend,
    capacity: Capacity,
    clock: StepClock | None = None,
    now: Callable[[], float] = time.monotonic,
) -> NativeEngine:
    """An engine that runs. Its owner stops it.

    Args:
        forward: the model, over as many blocks as `capacity` says.
        clock: told how each step goes.
        now: a monotonic clock in seconds, for deadlines and latencies.
    """
    pool = BlockPool(capacity.total_blocks, forward.block_size)
    prefixes = PrefixSharing(pool, enabled=capacity.prefix_caching)
    scheduler = Scheduler(capacity.steps, pool, prefixes)
    admission = Admission(
        max_requests=capacity.steps.max_running + capacity.max_waiting_requests,
        max_waiting_tokens=capacity.max_waiting_tokens,
    )
    runner = Runner(forward=forward, device=device, eos_ids=sorted(defaults.eos_ids), clock=clock)
    return NativeEngine(
        info=info,
        defaults=defaults,
        tokenizer=tokenizer,
        loop=EngineLoop(
            name=info.name,
            scheduler=scheduler,
            runner=runner,
            device=device,
            admission=admission,
            clock=clock,
            now=now,
        ),
        scheduler=scheduler,
        pool=pool,
        prefixes=prefixes,
        admission=admission,
        release=device.release_memory,
        now=now,
    )
