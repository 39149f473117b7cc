"""Which model is to be loaded: the result of reading one folder of the repository."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tengserve_backend.repository.settings import ModelSettings

Progress = Callable[[str, float], None]
"""Called while a model loads: the stage, in words for the operator, and how far that stage is, from 0.0 to 1.0.

It may raise to end the load early; a loader lets such an error through."""


class Backend(enum.Enum):
    """What serves a model; the values are those of `backend` in config.pbtxt."""

    TENGSERVE = "tengserve"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One version of one model, checked and ready to be loaded.

    Attributes:
        name: the model's name, equal to its folder's.
        version: the version folder's name, a positive integer without leading zeros.
        version_dir: that folder.
        settings: the `parameters` of config.pbtxt, typed; of an LLM only, the defaults for any other model.
        backend: what serves it.
        config: the whole configuration in Triton's JSON form, see repository.config_json; not to be changed.
    """

    name: str
    version: str
    version_dir: Path
    settings: ModelSettings
    backend: Backend = Backend.TENGSERVE
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
