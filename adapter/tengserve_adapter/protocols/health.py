"""Health and metadata of the v2 protocol: what is said of the server and of a model. Nothing here waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

EXTENSIONS: Final = ("generate",)
"""Triton's names of the protocol extensions that are really served."""


def server_metadata(name: str, version: str) -> dict[str, object]:
    """The body of `GET /v2`."""
    return {"name": name, "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(name: str, versions: Iterable[str]) -> dict[str, object]:
    """The body of `GET /v2/models/{m}`: text in, text out, as generate takes and gives it."""
    return {
        "name": name,
        "versions": list(versions),
        "platform": "tengserve",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}],
    }
