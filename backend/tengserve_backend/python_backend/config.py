"""The parts of a python model's configuration that its host acts on, typed; read from Triton's JSON form."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.inference import Datatype, TensorSpec
from tengserve_backend.python_backend.reshape import Reshape

MAX_INSTANCES = 256
"""Threads of one model."""

MAX_PRIORITY_LEVELS = 4096
"""Queues of one model."""

_DATATYPES = {datatype.config_name: datatype for datatype in Datatype}


class TimeoutAction(enum.Enum):
    """What becomes of a request that waited too long."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Triton's ModelQueuePolicy.

    Attributes:
        timeout_action: once the timeout passed: refuse the request, or serve it after all others of its level.
        default_timeout_us: microseconds that a request may wait; 0 is no limit.
        allow_timeout_override: whether a request may ask for a shorter timeout.
        max_queue_size: requests that may wait; 0 leaves it to the host's own bound.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class Batching:
    """Triton's dynamic batching.

    Attributes:
        preferred_sizes: dispatched as soon as one is reached, ascending.
        max_delay_ns: how long a smaller batch waits for more requests.
        preserve_ordering: answer requests in the order in which they came.
        priority_levels: 1 is the highest; 0 is one level for all.
        default_level: of requests that name none or one that is not there.
        default_policy, level_policies: of each level's queue.
    """

    preferred_sizes: tuple[int, ...] = ()
    max_delay_ns: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    level_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)


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
        sequence_idle_us: microseconds after which a sequence that sends nothing is forgotten; None without sequences.
        batching: None: each request runs alone.
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
    sequence_idle_us: int | None


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
        batching = _batching(config["dynamic_batching"], max_batch_size)
    sequences = config.get("sequence_batching")
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
        # Triton's default is a second.
        sequence_idle_us=None if sequences is None else sequences["max_sequence_idle_microseconds"] or 1_000_000,
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


def _batching(given: Mapping[str, Any], max_batch_size: int) -> Batching:
    sizes = tuple(sorted(set(given["preferred_batch_size"])))
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= max(1, max_batch_size):
        raise ConfigurationError(
            f"dynamic_batching: preferred_batch_size must be in [1, max_batch_size ({max_batch_size})]"
        )
    levels, default_level = given["priority_levels"], given["default_priority_level"]
    if levels > MAX_PRIORITY_LEVELS:
        raise ConfigurationError(f"dynamic_batching: priority_levels must be at most {MAX_PRIORITY_LEVELS}")
    if levels and not 1 <= default_level <= levels:
        raise ConfigurationError(
            f"dynamic_batching: default_priority_level must be in [1, priority_levels ({levels})], not {default_level}"
        )
    policies = {int(level): _policy(policy) for level, policy in given["priority_queue_policy"].items()}
    for level in policies:
        if not 1 <= level <= levels:
            raise ConfigurationError(f"dynamic_batching: priority_queue_policy has a policy for no level, {level}")
    return Batching(
        preferred_sizes=sizes,
        max_delay_ns=given["max_queue_delay_microseconds"] * 1000,
        preserve_ordering=given["preserve_ordering"],
        priority_levels=levels,
        default_level=default_level,
        default_policy=_policy(given["default_queue_policy"]) if "default_queue_policy" in given else QueuePolicy(),
        level_policies=policies,
    )


def _policy(given: Mapping[str, Any]) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(given["timeout_action"]),
        default_timeout_us=given["default_timeout_microseconds"],
        allow_timeout_override=given["allow_timeout_override"],
        max_queue_size=given["max_queue_size"],
    )
