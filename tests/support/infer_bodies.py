"""Bodies of v2 infer that no client of good will sends, as strategies of hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tengserve_backend.inference import Datatype

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([*(datatype.value for datatype in Datatype), "IN", "OUT", "text_input", "input_ids"]),
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
"""Any JSON, NaN included."""

NAMES = [
    "binary_data_size",
    "binary_data",
    "binary_data_output",
    "classification",
    "priority",
    "timeout",
    "sequence_id",
]
PARAMETERS = st.dictionaries(
    st.sampled_from([*NAMES, "max_tokens", "temperature", "stop", "seed", "x"]), JSON, max_size=3
)
SHAPES = st.lists(st.integers(-2, 4), max_size=3) | st.lists(st.integers(0, 2**64), max_size=40) | JSON


def mostly(usual: Any) -> st.SearchStrategy[Any]:
    """The usual value, or any JSON."""
    return st.one_of(st.just(usual), st.just(usual), JSON)


TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["IN", "text_input", "input_ids", "stream", "input0"]) | JSON,
        "shape": SHAPES,
        "datatype": st.sampled_from([datatype.value for datatype in Datatype]) | JSON,
        "data": st.lists(LEAVES, max_size=4) | JSON,
        "parameters": PARAMETERS | JSON,
    },
)
OUTPUTS = st.fixed_dictionaries({}, optional={"name": mostly("OUT"), "parameters": PARAMETERS | JSON})
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "id": mostly("r"),
        "inputs": st.lists(TENSORS, max_size=3) | JSON,
        "outputs": st.lists(OUTPUTS, max_size=2) | JSON,
        "parameters": PARAMETERS | JSON,
    },
)
LENGTHS = st.none() | st.integers(-1, 300).map(str) | st.sampled_from(["x", "1.0", "0x10"])
