"""What a config.pbtxt may say about a model of backend "python", and what only looks as if it had an effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.sequence_batching import check_sequence_batching

MAX_DIMENSIONS = 32
"""Of a tensor with its batch dimension: what a request can have."""

MODEL_FILE = "model.py"
"""The file in a version folder that has the class TritonPythonModel."""

_log = logging.getLogger(__name__)

_REFUSED_FIELDS = {
    "ensemble_scheduling": "a python model calls other models itself",
    "batch_input": "only backends of ragged batches make such inputs",
    "batch_output": "only backends of ragged batches read such outputs",
    "model_repository_agents": "models are served as they are on the disk",
}
"""Ignoring these would change answers."""

_IDLE_FIELDS = {
    "optimization",
    "model_warmup",
    "model_operations",
    "response_cache",
    "cc_model_filenames",
    "metric_tags",
    "model_metrics",
    "runtime",
}
"""Ignoring these changes no answer; the operator is told."""

_IDLE_PARAMETERS = {
    "EXECUTION_ENV_PATH": "packages come from the server's own environment",
}


def check_python_config(config: Any, file: str) -> None:
    """Check what the schema does not.

    Raises:
        ConfigurationError: a field that a python model cannot have here.
    """
    for field, _ in config.ListFields():
        if advice := _REFUSED_FIELDS.get(field.name):
            raise ConfigurationError(f"{field.name} is not supported for a python model ({advice})", file=file)
        if field.name in _IDLE_FIELDS:
            _log.warning("%s: %s has no effect", file, field.name)
    for key, reason in _IDLE_PARAMETERS.items():
        if key in config.parameters:
            _log.warning("%s: the parameter %s has no effect: %s", file, key, reason)
    if config.max_batch_size < 0:
        raise ConfigurationError(f"max_batch_size must be 0 or more, not {config.max_batch_size}", file=file)
    for kind, tensors in (("input", config.input), ("output", config.output)):
        _check_tensors(kind, tensors, file, batched=config.max_batch_size > 0)
    check_sequence_batching(config, file)
    model_file(config, file)


def _check_tensors(kind: str, tensors: Any, file: str, *, batched: bool) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if not tensor.name or tensor.name in names:
            raise ConfigurationError(f'{kind} "{shown(tensor.name)}" needs a name of its own', file=file)
        names.add(tensor.name)
        most = MAX_DIMENSIONS - batched
        for field, dims in (("dims", tensor.dims), ("reshape", tensor.reshape.shape)):
            if len(dims) > most:
                raise ConfigurationError(
                    f'{kind} "{shown(tensor.name)}": {field} must have at most {most} dimensions, not {len(dims)}',
                    file=file,
                )
        for dim in (*tensor.dims, *tensor.reshape.shape):
            if dim < -1 or dim == 0:
                raise ConfigurationError(
                    f'{kind} "{shown(tensor.name)}": a dimension must be positive, or -1 for any, not {dim}', file=file
                )
        if tensor.HasField("reshape"):
            _check_reshape(f'{kind} "{shown(tensor.name)}"', tensor, file, batched=batched)


def _check_reshape(what: str, tensor: Any, file: str, *, batched: bool) -> None:
    shape = list(tensor.reshape.shape)
    if not shape and not batched:
        raise ConfigurationError(f"{what}: reshape may be empty only where max_batch_size is more than 0", file=file)
    if _between_open(tensor.dims) != _between_open(shape):
        raise ConfigurationError(
            f"{what}: reshape {shape} must have as many elements as dims {list(tensor.dims)}, before, between and "
            f"after its dimensions of any size",
            file=file,
        )


def _between_open(dims: Iterable[int]) -> list[int]:
    """How many elements the fixed dimensions make, between those of any size."""
    products = [1]
    for dim in dims:
        if dim < 0:
            products.append(1)
        else:
            products[-1] *= dim
    return products


def model_file(config: Any, file: str) -> str:
    """The name of the file with the model's class, the same in every version folder."""
    name = str(config.default_model_filename) or MODEL_FILE
    if not name.endswith(".py") or Path(name).name != name:
        raise ConfigurationError(
            f'default_model_filename must be the name of a file that ends in .py, not "{shown(name)}"', file=file
        )
    return name
