"""Who decides which models of the repository are loaded."""

from __future__ import annotations

import enum


class ControlMode(enum.Enum):
    """Values as Triton's --model-control-mode takes them.

    NONE: all, at the start. EXPLICIT: who asks for a load or an unload. POLL: what is on the disk.
    """

    NONE = "none"
    EXPLICIT = "explicit"
    POLL = "poll"
