"""One uniform number a sequence and token, from a counter: no state to keep, lose or share.

The number depends on the seed and on the index of the token alone, so a seeded answer is the same alone, in any batch,
after preemption and on any device whose logits agree.
"""

from __future__ import annotations

import numpy as np


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: in [0, 2**64).
        index: of the generated token in its answer, from 0.
    """
    bits = int(np.random.Philox(key=seed, counter=index).random_raw())
    return float((bits >> 11) * 2.0**-53)
