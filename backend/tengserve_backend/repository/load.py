"""From a checked source to a running engine: the one place where the repository meets the engine."""

from __future__ import annotations

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.source import Backend, ModelSource, Progress
from tengserve_backend.repository.weights import resolve_weights


def load_model(source: ModelSource, progress: Progress) -> Engine:
    """Bring the weights into a folder that transformers reads, and start an engine on them. Blocks until ready.

    Raises:
        ConfigurationError: the settings and the weights or the machine do not fit; the message says what to change.
    """
    if source.backend is not Backend.TENGSERVE:
        raise ConfigurationError(f'backend "{source.backend.value}" is not served yet')
    weights_dir = resolve_weights(source, progress)
    # Imported here because it brings torch: reading and checking a repository must stay quick.
    from tengserve_backend.engine.load import load_engine

    return load_engine(source, weights_dir, progress)
