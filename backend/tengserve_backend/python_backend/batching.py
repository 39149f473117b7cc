"""Dynamic batching and its queue policies, as config.pbtxt sets them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tengserve_backend.errors import ConfigurationError

MAX_PRIORITY_LEVELS = 4096
"""Queues of one model."""


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


def read_batching(given: Mapping[str, Any], max_batch_size: int) -> Batching:
    """The typed form of `dynamic_batching`.

    Raises:
        ConfigurationError: a value that the schema allows and a model cannot have.
    """
    sizes = preferred_sizes("dynamic_batching", given, max_batch_size)
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


def preferred_sizes(where: str, given: Mapping[str, Any], max_batch_size: int) -> tuple[int, ...]:
    """The field preferred_batch_size of a batcher, ascending; raises ConfigurationError."""
    sizes = tuple(sorted(set(given["preferred_batch_size"])))
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= max(1, max_batch_size):
        raise ConfigurationError(f"{where}: preferred_batch_size must be in [1, max_batch_size ({max_batch_size})]")
    return sizes


def _policy(given: Mapping[str, Any]) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(given["timeout_action"]),
        default_timeout_us=given["default_timeout_microseconds"],
        allow_timeout_override=given["allow_timeout_override"],
        max_queue_size=given["max_queue_size"],
    )
