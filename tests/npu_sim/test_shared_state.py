"""Another process's simulated NPU is watched and broken from outside, while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from npu_sim.simulator.state import SharedState

_PROGRAM = """
import sys, torch
there = torch.ones(4, device="npu")
print("ready", flush=True)
for line in sys.stdin:
    try:
        print((there + 1).sum().item(), torch.npu.mem_get_info()[1], flush=True)
    except RuntimeError as error:
        print("507015" in str(error), flush=True)
"""


def test_counters_and_knobs_work_from_outside(tmp_path: Path) -> None:
    shared = SharedState(tmp_path / "state", memory_mib=256)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        env=os.environ | shared.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None
        shared.state.reset_counters()
        assert ask() == f"8.0 {256 << 20}"
        assert shared.state.device_to_host == 1
        assert shared.state.launches == 2
        shared.state.break_device(507015)
        assert ask() == "True"
        process.stdin.close()
        assert process.wait(60) == 0
