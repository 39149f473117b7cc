"""What the garbage collector need not look at."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out_of_collections() -> None:
    """Keep the garbage collector from looking at what there is now, which stays for as long as the process.

    A whole collection stops every thread while it looks at every object, and the modules of a server alone have
    hundreds of thousands: a tenth of a second in which no request is answered, several times a minute. To be called
    before a model is loaded: what a model leaves behind must be found when it is unloaded.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Let the garbage collector rest while a large module is imported, and leave alone what is there afterwards.

    torch and transformers are half a million objects that stay for good. Looked through again and again while there
    come more of them, they take a quarter longer to import; and each full collection afterwards would stop every thread
    for a sixth of a second, to find none that can go.

    Args:
        name: of the module; when it has been imported already, nothing is done.
    """
    if name in sys.modules:
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.freeze()
