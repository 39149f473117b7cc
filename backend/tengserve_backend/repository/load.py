"""From a checked source to a running model: the one place where the repository meets what serves a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tengserve_backend.devices.npu.guard import guard, import_torch
from tengserve_backend.engine.base import Engine
from tengserve_backend.garbage import importing
from tengserve_backend.inference import TensorModel
from tengserve_backend.python_backend import Peers, load_python_model
from tengserve_backend.python_backend.model import DEFAULT_REQUEST_TIMEOUT_S
from tengserve_backend.repository.source import Backend, ModelSource, Progress
from tengserve_backend.repository.weights import resolve_weights


def load_model(
    source: ModelSource,
    progress: Progress,
    peers: Peers | None = None,
    *,
    device: str = "auto",
    step_profile: Path | None = None,
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
) -> Engine | TensorModel:
    """Start what serves a model. Blocks until it is ready.

    For an LLM, bring the weights into a folder that transformers reads and start an engine on them; for a python
    model, import its file and start its instances.

    Args:
        source: what to load.
        progress: told how far it is; an error that it raises ends the load.
        peers: the models that a python model may ask.
        device: of an LLM whose own setting is auto.
        step_profile: a folder for traces of an LLM's last steps; None measures nothing.
        request_timeout_s: how long a request to a python model waits for its next response.

    Raises:
        ConfigurationError: settings, weights and machine do not fit, or a python model does not start; the message
            says what to change.
    """
    guard()
    if source.backend is Backend.PYTHON:
        return load_python_model(source, progress, peers, request_timeout_s=request_timeout_s)
    if source.settings.device == "auto":
        source = dataclasses.replace(source, settings=dataclasses.replace(source.settings, device=device))
    weights_dir = resolve_weights(source, progress)
    # Imported here because it brings torch: reading and checking a repository must stay quick.
    with importing("tengserve_backend.engine.load"):
        import_torch()
        from tengserve_backend.engine.load import load_engine

    return load_engine(source, weights_dir, progress, step_profile=step_profile)
