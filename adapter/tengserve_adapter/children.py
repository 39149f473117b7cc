"""Processes that models start: what they must not inherit, and how they end with the server.

A forked process has the server's signal handlers, which write to the server's own event loop: without what is here, a
pool that ends its workers by SIGTERM, as `with multiprocessing.Pool()` does, would stop the server.
"""

from __future__ import annotations

import os
import signal
import sys

from tengserve_backend.native.compilers import compilers


def keep_signals_to_this_process() -> None:
    """Let what is forked from now on end by SIGTERM, and leave a Ctrl-C to the server, which drains first."""
    os.register_at_fork(after_in_child=_forget_signals)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def kill_children() -> None:
    """Kill the processes of `multiprocessing` that models have left running; for an end that lets nothing else end.

    Compilers of kernels end too. Python ends all of them itself where it comes to its own end. Processes that were
    started by other means are not known.
    """
    compilers.kill()
    # Imported by whoever started one.
    multiprocessing = sys.modules.get("multiprocessing")
    for child in [] if multiprocessing is None else multiprocessing.active_children():
        child.kill()
