"""From a checked source to a running model: the one place where the repository meets what serves a model."""

from __future__ import annotations

from collections.abc import Mapping

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.inference import TensorModel
from tengserve_backend.python_backend import Peers, load_python_model
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.source import Backend, ModelSource, Progress
from tengserve_backend.repository.weights import resolve_weights


def load_model(source: ModelSource, progress: Progress, peers: Peers | None = None) -> Engine | TensorModel:
    """Start what serves a model. Blocks until it is ready.

    For an LLM, bring the weights into a folder that transformers reads and start an engine on them; for a python
    model, import its file and start its instances.

    Args:
        source: what to load.
        progress: told how far it is; an error that it raises ends the load.
        peers: the models that a python model may ask.

    Raises:
        ConfigurationError: settings, weights and machine do not fit, or a python model does not start; the message
            says what to change.
    """
    if source.backend is Backend.PYTHON:
        return load_python_model(source, progress, peers)
    weights_dir = resolve_weights(source, progress)
    # Imported here because it brings torch: reading and checking a repository must stay quick.
    from tengserve_backend.engine.load import load_engine

    return load_engine(source, weights_dir, progress)


class ModelPeers:
    """The models of a manager, for python models to ask; see Peers.

    Args:
        manager: has them.
    """

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """See Peers."""
        return self._manager.tensor_model(name, version)

    def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        """Refused: which models are served is the operator's to say, not a model's."""
        raise ConfigurationError("This server does not let models load or unload others.")

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Refused, as `load` is."""
        raise ConfigurationError("This server does not let models load or unload others.")
