from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one random llama, "tiny"."""
    repository = tmp_path_factory.mktemp("repository")
    build_tiny_model(add_model(repository, "tiny"))
    return repository


@pytest.fixture(scope="module")
def tiny_server(tiny_repository: Path) -> Iterator[ServerProcess]:
    """A server with the model "tiny", ready; tests leave it as they found it."""
    with ServerProcess("--model-repository", str(tiny_repository)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def scripted_repository(tmp_path: Path) -> Path:
    """A model repository for scripted servers, which need no weights."""
    repository = tmp_path / "repository"
    add_model(repository, "scripted")
    return repository
