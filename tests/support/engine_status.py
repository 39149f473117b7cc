"""An EngineStatus of an idle engine, for fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tengserve_backend.engine.base import EngineStatus
from tengserve_backend.engine.statistics import StatisticsRecorder

_IDLE = EngineStatus(
    alive=True,
    failure=None,
    device_lost=False,
    waiting_requests=0,
    waiting_tokens=0,
    running_requests=0,
    seconds_since_step=0.0,
    total_blocks=8,
    free_blocks=8,
    block_size=16,
    cached_blocks=0,
    steps=0,
    preemptions=0,
    prefix_asked_tokens=0,
    prefix_hit_tokens=0,
    statistics=StatisticsRecorder({}).snapshot(),
)


def engine_status(*, failure: str | None = None, generated_tokens: int = 0, **changes: Any) -> EngineStatus:
    """An idle engine's status but for the changes."""
    statistics = replace(_IDLE.statistics, generated_tokens=generated_tokens)
    return replace(_IDLE, alive=failure is None, failure=failure, statistics=statistics, **changes)
