"""What the garbage collector need not look at."""

from __future__ import annotations

import gc


def leave_out_of_collections() -> None:
    """Keep the garbage collector from looking at what there is now, which stays for as long as the process.

    A whole collection stops every thread while it looks at every object, and the modules of a server alone have
    hundreds of thousands: a tenth of a second in which no request is answered, several times a minute. To be called
    before a model is loaded: what a model leaves behind must be found when it is unloaded.
    """
    gc.collect()
    gc.freeze()
