"""What is there when the server starts, or comes with a large import, is no work for the garbage collector any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tengserve_backend.garbage import importing, leave_out_of_collections


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def is_looked_at(one: object) -> bool:
    return any(other is one for other in gc.get_objects())


def test_a_collection_looks_at_nothing_but_what_is_made_later() -> None:
    before = [object()]
    assert is_looked_at(before)
    leave_out_of_collections()
    after = [object()]
    assert not is_looked_at(before)
    assert is_looked_at(after)


def test_the_collector_rests_and_then_leaves_alone_what_is_there() -> None:
    before = [object()]
    with importing("a.module.that.is.new"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not is_looked_at(before)


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing("a.module.that.is.new"):
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_a_second_import_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with importing("sys"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
