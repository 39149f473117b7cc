"""Where a model's weights are: a folder, a path, or a file that an installed Python package ships."""

from __future__ import annotations

from pathlib import Path

from tengserve_backend.repository.source import ModelSource, Progress


def resolve_weights(source: ModelSource, progress: Progress) -> Path:
    """The folder with the files that transformers loads: config.json, tokenizer files and safetensors.

    Raises:
        ConfigurationError: there is no such folder or file, or it holds no weights that we load.
    """
    return source.version_dir / source.settings.weights
