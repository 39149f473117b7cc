"""What a process that computes must have in its environment before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

SPINS: Final = "10000"
"""How often a compute thread looks for work before it sleeps.

The OpenMP library that torch brings (GNU's) has 300000 by default where there are as many cores as threads: tens of
milliseconds in which a thread that waits keeps the core from the one that it waits for, when another program or the
event loop takes the second core. So few are tens of microseconds to half a millisecond, by processor: longer than from
one operator to the next, and shorter than a time slice.
"""

_WAITING: Final = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the operator has not set. Call it before anything imports torch, which reads it once."""
    if _WAITING.isdisjoint(environment):
        environment["GOMP_SPINCOUNT"] = SPINS
    # One text at a time is encoded, for which `tokenizers` would start a thread on every core of the machine.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
