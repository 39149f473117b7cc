from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from npu_sim.simulator.state import State

# These tests need the environment that scripts/_env_npu makes; a plain pytest passes them over.
collect_ignore_glob = [] if os.environ.get("NPU_SIM") == "1" else ["*"]


@pytest.fixture
def npu() -> Iterator[State]:
    """The simulated NPU of this process, healthy and with counters at zero; left healthy."""
    import torch

    from npu_sim.simulator.state import own

    state = own()
    memory = state.memory_bytes
    # The first use makes streams and fills caches: none of it is what a test counts.
    torch.zeros(1, device="npu").cpu()
    torch.npu.synchronize()
    state.reset_counters()
    yield state
    state.break_device(0)
    state.memory_bytes, state.malloc_failures, state.defer_copies = memory, 0, 1
