"""Programs in a process of their own, on a simulated NPU of their choice."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

TIMEOUT_S = 120.0


def run_simulated(program: str, **variables: str) -> str:
    """Run Python source in a new process; what it printed.

    Args:
        program: the source; indentation common to all lines goes.
        variables: of its environment, such as NPU_SIM_SOC="Ascend310P3".

    Raises:
        AssertionError: it ended with another status than 0; with all that it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | variables
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
