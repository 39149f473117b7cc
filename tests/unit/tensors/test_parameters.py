from __future__ import annotations

import pytest

from tengserve_adapter.tensors.parameters import sort_out
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import SequenceFlags


def test_the_protocols_own_parameters_do_not_reach_the_model() -> None:
    sorted_out = sort_out(
        {
            "priority": 3,
            "timeout": 1_000_000,
            "sequence_id": 7,
            "sequence_start": True,
            "sequence_end": False,
            "binary_data_output": True,
            "text": "a",
            "flag": False,
            "count": -1,
            "share": 0.5,
        }
    )
    assert (sorted_out.priority, sorted_out.timeout_us, sorted_out.binary_data_output) == (3, 1_000_000, True)
    assert sorted_out.sequence == SequenceFlags(7, start=True, end=False)
    assert sorted_out.parameters == {"text": "a", "flag": False, "count": -1, "share": 0.5}


def test_a_sequence_may_have_a_name() -> None:
    assert sort_out({"sequence_id": "chat"}).sequence.correlation_id == "chat"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("priority", -1, "parameter 'priority' must be an unsigned integer, got -1"),
        ("timeout", True, "parameter 'timeout' must be an unsigned integer, got true"),
        ("sequence_id", 0.5, "must be an unsigned integer or a string, got 0.5"),
        ("sequence_start", 1, "parameter 'sequence_start' must be boolean, got 1"),
        ("triton_x", 1, "parameter keys starting with 'triton_' are reserved for Triton usage"),
        ("headers", "a", "parameter 'headers' is reserved"),
        ("x", [1], "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("x", None, "parameter 'x' has invalid type"),
        ("x", float("inf"), "parameter 'x' has invalid type"),
        ("x", 2**64, "parameter 'x' must fit 64 bits"),
    ],
)
def test_wrong_parameters_are_refused(name: str, value: object, complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        sort_out({name: value})
    assert complaint in refused.value.message
    assert refused.value.field == name


def test_their_number_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="at most 1024 parameters"):
        sort_out({str(index): 1 for index in range(1025)})
