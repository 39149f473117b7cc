from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tengserve_backend.imports import importing


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_rests_and_then_leaves_alone_what_is_there() -> None:
    with importing("a.module.that.is.new"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(each is gc for each in gc.get_objects())


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing("a.module.that.is.new"):
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_a_second_import_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with importing("sys"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
