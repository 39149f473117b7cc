"""The files of the model that a repository serves, as transformers reads them."""

from __future__ import annotations

from pathlib import Path

from tengserve_backend.repository.scan import scan_repository
from tengserve_backend.repository.source import Backend, ModelSource
from tengserve_backend.repository.weights import resolve_weights

REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"


def only_llm(repository: Path = REPOSITORY) -> ModelSource:
    """The repository's only LLM.

    Raises:
        SystemExit: there is not exactly one.
    """
    sources = [source for source in scan_repository(repository) if source.backend is Backend.TENGSERVE]
    if len(sources) != 1:
        raise SystemExit(f"the repository has {len(sources)} LLMs, and this needs exactly one")
    return sources[0]


def weights_folder(repository: Path = REPOSITORY) -> Path:
    """The folder of the repository's only LLM; its GGUF file is converted first, which takes a while.

    Raises:
        SystemExit: there is not exactly one.
    """
    return resolve_weights(only_llm(repository), lambda stage, fraction: None)
