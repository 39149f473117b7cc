"""Statistics as the v2 protocol prints them, over HTTP and gRPC."""

from __future__ import annotations

from google.protobuf import json_format

from tengserve_adapter.grpc.schema import schema
from tengserve_adapter.protocols.repository import statistics_json
from tengserve_backend.inference import BatchStatistics, ModelStatistics, ResponseStatistics

STATISTICS = ModelStatistics(
    inference_count=7,
    execution_count=3,
    last_inference_ms=5,
    success=(2, 20),
    batches=(BatchStatistics(1, 2, 10, 20, 30), BatchStatistics(5, 1, 4, 5, 6)),
    responses=(
        ResponseStatistics(compute_infer=(2, 9), compute_output=(2, 3), success=(2, 12)),
        ResponseStatistics(compute_infer=(1, 8), fail=(1, 8), empty_response=(0, 0), cancel=(1, 4)),
    ),
)


def pair(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def test_batches_and_responses_have_triton_s_names() -> None:
    row = statistics_json("m", "2", STATISTICS)
    assert row["batch_stats"] == [
        {
            "batch_size": 1,
            "compute_input": pair(2, 10),
            "compute_infer": pair(2, 20),
            "compute_output": pair(2, 30),
        },
        {"batch_size": 5, "compute_input": pair(1, 4), "compute_infer": pair(1, 5), "compute_output": pair(1, 6)},
    ]
    assert row["response_stats"] == {
        "0": {
            "compute_infer": pair(2, 9),
            "compute_output": pair(2, 3),
            "success": pair(2, 12),
            "fail": pair(0, 0),
            "empty_response": pair(0, 0),
            "cancel": pair(0, 0),
        },
        "1": {
            "compute_infer": pair(1, 8),
            "compute_output": pair(0, 0),
            "success": pair(0, 0),
            "fail": pair(1, 8),
            "empty_response": pair(0, 0),
            "cancel": pair(1, 4),
        },
    }
    assert row["memory_usage"] == []


def test_grpc_s_message_takes_all_of_it() -> None:
    row = statistics_json("m", "2", STATISTICS)
    message = json_format.ParseDict(dict(row), schema().messages["ModelStatistics"]())
    assert (message.response_stats["1"].cancel.count, message.response_stats["0"].success.ns) == (1, 12)
    assert [(batch.batch_size, batch.compute_infer.ns) for batch in message.batch_stats] == [(1, 20), (5, 5)]
