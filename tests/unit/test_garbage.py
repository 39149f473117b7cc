"""What is there when the server starts is no work for the garbage collector any more."""

from __future__ import annotations

import gc

from tengserve_adapter.garbage import leave_out_of_collections


def is_looked_at(one: object) -> bool:
    return any(other is one for other in gc.get_objects())


def test_a_collection_looks_at_nothing_but_what_is_made_later() -> None:
    before = [object()]
    assert is_looked_at(before)
    try:
        leave_out_of_collections()
        after = [object()]
        assert not is_looked_at(before)
        assert is_looked_at(after)
    finally:
        gc.unfreeze()
