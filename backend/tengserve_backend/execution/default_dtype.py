"""torch's default dtype: one for the whole process, and switched by transformers while it makes a model.

It also switches functions of torch.nn.init, and back to what it found: two at a time could leave them switched, so one
model is made at a time. Forwards that run meanwhile do not notice, for they name their dtypes; the exception, found by
tests/oracle/test_default_dtype.py, is rotary frequencies that are computed anew in the forward ("dynamic"). Such a
model waits with its step until the other one, if of half precision, is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_making = threading.Lock()
_steady = threading.Lock()


@contextmanager
def making_model(dtype: torch.dtype) -> Iterator[None]:
    """Around transformers' making of a model in this dtype."""
    with _making:
        if dtype is torch.get_default_dtype():
            yield
        else:
            with _steady:
                yield


@contextmanager
def steady_default_dtype() -> Iterator[None]:
    """Around a forward that depends on the default dtype."""
    with _steady:
        yield
