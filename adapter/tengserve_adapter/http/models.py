"""What the HTTP edge needs to know of the models: a part of tengserve_backend.repository.manager.ModelManager."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from tengserve_backend.engine.base import Engine
from tengserve_backend.inference import TensorModel


class Status(Protocol):
    """One version of one model."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> str:
        """The version."""
        ...

    @property
    def state(self) -> enum.Enum:
        """Its value is "LOADING", "READY", "UNLOADING" or "UNAVAILABLE"."""
        ...

    @property
    def reason(self) -> str:
        """Why it is unavailable: "unloaded", or one sentence that a client may see."""
        ...


class Models(Protocol):
    """The models of this server."""

    def engine(self, name: str, version: str | None = None) -> Engine:
        """The engine of a ready model.

        Raises:
            ModelNotFoundError: no such model or version.
            ModelNotReadyError: it is there, and not ready.
            InvalidRequestError: it takes tensors and generates no text.
        """
        ...

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """A ready model that takes tensors, an LLM among them: that one behind its tensor names.

        Raises:
            ModelNotFoundError: no such model or version.
            ModelNotReadyError: it is there, and not ready.
        """
        ...

    def statuses(self) -> Sequence[Status]:
        """Every version of every model."""
        ...

    def started(self) -> bool:
        """Whether every model that the server was started with has been tried."""
        ...

    def default_name(self) -> str | None:
        """The only model's name; None when there are several, or none."""
        ...
