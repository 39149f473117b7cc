"""Health and metadata of the v2 protocol: what is said of the server and of a model. Nothing here waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tengserve_backend.inference import TensorModel, TensorSpec

EXTENSIONS: Final = (
    "classification",
    "sequence",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
    "generate",
)
"""The protocol extensions that are really served: Triton's names in its order, and generate, which it does not list."""


def server_metadata(name: str, version: str) -> dict[str, object]:
    """The body of `GET /v2`."""
    return {"name": name, "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(model: TensorModel, versions: Iterable[str]) -> dict[str, object]:
    """The body of `GET /v2/models/{m}`."""
    return {
        "name": model.name,
        "versions": list(versions),
        "platform": model.platform,
        "inputs": [_tensor(spec) for spec in model.inputs],
        "outputs": [_tensor(spec) for spec in model.outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": list(spec.shape)}
