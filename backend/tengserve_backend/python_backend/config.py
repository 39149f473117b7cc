"""The parts of a python model's configuration that its host acts on, typed; read from Triton's JSON form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.inference import Datatype, TensorSpec
from tengserve_backend.python_backend.batching import Batching, read_batching
from tengserve_backend.python_backend.reshape import Reshape
from tengserve_backend.python_backend.sequence_batching import SequenceBatching, read_sequence_batching

MAX_INSTANCES = 256
"""Threads of one model."""

_DATATYPES = {datatype.config_name: datatype for datatype in Datatype}


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """One group of instances: its name, how many, and the kind and device that each is told."""

    name: str
    count: int
    kind: str
    device_id: int


@dataclass(frozen=True, slots=True)
class PythonConfig:
    """See the attributes' names in Triton's ModelConfig.

    Attributes:
        inputs, outputs: as clients see them.
        input_reshapes, output_reshapes: by name, of those that the model has in another shape.
        ragged: inputs whose shapes may differ within a batch.
        batching: None: each request runs alone, unless there are sequences.
        sequences: None: a request stands for itself.
    """

    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_reshapes: Mapping[str, Reshape]
    output_reshapes: Mapping[str, Reshape]
    decoupled: bool
    instances: tuple[InstanceGroup, ...]
    model_filename: str
    batching: Batching | None
    ragged: frozenset[str]
    sequences: SequenceBatching | None


def read_python_config(config: Mapping[str, Any], model_dir: Path) -> PythonConfig:
    """The typed configuration.

    Args:
        config: as repository.config_json makes it.
        model_dir: the model's folder, where label files are.

    Raises:
        ConfigurationError: a value that the schema allows and a model cannot have.
    """
    max_batch_size = config["max_batch_size"]
    outputs = config["output"]
    labels = {output["name"]: _labels(output.get("label_filename", ""), model_dir) for output in outputs}
    instances = tuple(
        InstanceGroup(
            group["name"],
            group["count"],
            group["kind"].removeprefix("KIND_"),
            group["gpus"][0] if group["gpus"] else 0,
        )
        for group in config["instance_group"]
    )
    if sum(group.count for group in instances) > MAX_INSTANCES:
        raise ConfigurationError(f"instance_group: a model may have at most {MAX_INSTANCES} instances")
    batching = None
    if "dynamic_batching" in config:
        batching = read_batching(config["dynamic_batching"], max_batch_size)
    sequences = None
    if "sequence_batching" in config:
        sequences = read_sequence_batching(config["sequence_batching"], max_batch_size)
    return PythonConfig(
        platform=config["platform"] or config["backend"],
        max_batch_size=max_batch_size,
        inputs=tuple(_spec(tensor, max_batch_size) for tensor in config["input"]),
        outputs=tuple(_spec(tensor, max_batch_size, labels[tensor["name"]]) for tensor in outputs),
        input_reshapes=_reshapes(config["input"], max_batch_size),
        output_reshapes=_reshapes(outputs, max_batch_size),
        decoupled=config.get("model_transaction_policy", {}).get("decoupled", False),
        instances=instances,
        model_filename=config["default_model_filename"] or "model.py",
        batching=batching,
        ragged=frozenset(tensor["name"] for tensor in config["input"] if tensor["allow_ragged_batch"]),
        sequences=sequences,
    )


def _spec(tensor: Mapping[str, Any], max_batch_size: int, labels: tuple[str, ...] = ()) -> TensorSpec:
    datatype = _DATATYPES.get(tensor["data_type"])
    if datatype is None:
        raise ConfigurationError(f'"{shown(tensor["name"])}" needs a data_type')
    if not tensor["dims"]:
        raise ConfigurationError(f'"{shown(tensor["name"])}" needs dims')
    batch = (-1,) if max_batch_size > 0 else ()
    return TensorSpec(
        tensor["name"], datatype, (*batch, *tensor["dims"]), optional=tensor.get("optional", False), labels=labels
    )


def _reshapes(tensors: Iterable[Mapping[str, Any]], max_batch_size: int) -> dict[str, Reshape]:
    batch = (-1,) if max_batch_size > 0 else ()
    return {
        tensor["name"]: Reshape((*batch, *tensor["dims"]), (*batch, *tensor["reshape"]["shape"]))
        for tensor in tensors
        if "reshape" in tensor
    }


def _labels(filename: str, model_dir: Path) -> tuple[str, ...]:
    if not filename:
        return ()
    path = (model_dir / filename).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise ConfigurationError("label_filename must be a file in the model's folder")
    try:
        return tuple(line.strip() for line in path.read_text("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f'label_filename: "{shown(filename)}" cannot be read as text') from error
