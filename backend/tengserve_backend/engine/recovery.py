"""Running a step so that a failure costs as little as it can.

- Out of memory: the lower half of the step's sequences gives its blocks back and waits; the rest is tried once more.
- Anything else that the model raises: each part of the step runs alone, so only what fails alone is lost. Running a
  part again is harmless (see ModelForward).
- A lost device ends the engine at once: nothing else would succeed, and some calls would never return.
- When a part has failed, a probe that has nothing to do with any request tells a bad request from a broken engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.errors import DeviceLostError, GenerationFailedError, TengserveError
from tengserve_backend.generation import NextToken, ResolvedSampling
from tengserve_backend.scheduling.scheduler import Scheduler
from tengserve_backend.scheduling.step import Step

_log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the engine needs of execution.runner.Runner."""

    def admit(
        self,
        seq_id: int,
        *,
        prompt_ids: list[int],
        sampling: ResolvedSampling,
        min_new_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> None:
        """Announce a sequence."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        ...

    def run(self, step: Step) -> Mapping[int, NextToken | None]:
        """Compute a step."""
        ...

    def probe(self) -> None:
        """Run the model on nothing in particular; raises when it cannot run at all."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a step.

    Attributes:
        step: the parts that were computed; fewer than asked for when some were preempted or failed.
        tokens: the next token of each of these that samples.
        failures: why a sequence failed; its part is not in `step`.
    """

    step: Step
    tokens: Mapping[int, NextToken]
    failures: Mapping[int, TengserveError]


def run_step(step: Step, *, runner: StepRunner, scheduler: Scheduler, device: DeviceBackend) -> StepOutcome:
    """Run a step that the scheduler has just made.

    Raises:
        Exception: whatever the probe raises, or what says that the device is lost: the engine is broken.
    """
    try:
        return _outcome(step, runner.run(step))
    except Exception as error:  # foreign model code; what it raises decides how to go on
        if device.is_fault(error):
            raise
        if not device.is_out_of_memory(error):
            _log.error("a step of %d sequences failed; they run one by one", len(step.sequences), exc_info=error)
            return _run_apart(step, runner, device)
        _log.warning("out of memory in a step of %d sequences and %d tokens", len(step.sequences), step.total_tokens)
    device.release_memory()
    smaller = scheduler.shed(step)
    try:
        return _outcome(smaller, runner.run(smaller))
    except Exception as error:  # as above
        if device.is_fault(error):
            raise
        _log.error("a smaller step failed too; its sequences run one by one", exc_info=error)
        device.release_memory()
        return _run_apart(smaller, runner, device)


def device_lost(device: DeviceBackend, model: str, error: BaseException) -> DeviceLostError:
    """What those get who waited for a device that failed; the log gets what it means.

    Args:
        device: that failed.
        model: that ran on it.
        error: that said so.
    """
    lost = DeviceLostError(f"The device {device.name} of model {model} failed.")
    _log.critical("%s %s", lost.message, device.explain(error), exc_info=error)
    return lost


def _outcome(step: Step, tokens: Mapping[int, NextToken | None]) -> StepOutcome:
    failures: dict[int, TengserveError] = {
        seq_id: GenerationFailedError("The model gave no finite scores for this request.")
        for seq_id, token in tokens.items()
        if token is None
    }
    chosen = {seq_id: token for seq_id, token in tokens.items() if token is not None}
    return StepOutcome(step.without(failures.keys()), chosen, failures)


def _run_apart(step: Step, runner: StepRunner, device: DeviceBackend) -> StepOutcome:
    tokens: dict[int, NextToken] = {}
    failures: dict[int, TengserveError] = {}
    for alone in step.apart():
        try:
            outcome = _outcome(alone, runner.run(alone))
        except Exception as error:  # as above
            if device.is_fault(error):
                raise
            (part,) = alone.sequences
            _log.error("a request failed in the model", exc_info=error)
            failures[part.seq_id] = GenerationFailedError("The model failed while it ran this request.")
        else:
            tokens.update(outcome.tokens)
            failures.update(outcome.failures)
    if failures:
        runner.probe()
    return StepOutcome(step.without(failures.keys()), tokens, failures)
