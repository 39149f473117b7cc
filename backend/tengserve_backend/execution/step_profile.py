"""Where the time of a step goes: seconds by phase, and a trace of the last steps in Chrome's trace format.

A device that computes behind the host's back returns from the forward early; the wait for it is then part of the phase
that reads its answer, `sample`. Nothing is synchronised for the sake of measuring.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_log = logging.getLogger(__name__)

MAX_TRACED_STEPS: Final = 4096
"""A trace has this many steps at most, the last ones: a few megabytes."""

_NOTHING: Final[Mapping[str, float]] = {}


class Phase(enum.Enum):
    """The parts of a step, in the order in which they come first."""

    SCHEDULE = "schedule"
    PREPARE = "prepare"
    FORWARD = "forward"
    SAMPLE = "sample"
    DETOKENIZE = "detokenize"
    DELIVER = "deliver"


class StepClock(Protocol):
    """What is told of a step's course. The engine's thread calls it."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase since the start, every phase from the beginning on; empty when nothing is measured.

        Read from any thread.
        """
        ...

    def begin(self) -> None:
        """A step may begin now; one that was begun and not ended is forgotten."""
        ...

    def mark(self, phase: Phase) -> None:
        """The time since the mark before, or since the beginning, was this phase's. A phase may have several."""
        ...

    def end(self, sequences: int, tokens: int) -> None:
        """The step is over; it had so many sequences and tokens."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


class NoClock:
    """Measures nothing."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """See StepClock."""
        return _NOTHING

    def begin(self) -> None:
        """See StepClock."""

    def mark(self, phase: Phase) -> None:
        """See StepClock."""

    def end(self, sequences: int, tokens: int) -> None:
        """See StepClock."""

    def close(self) -> None:
        """See StepClock."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in the trace: when it began, when each of its marks was, and what it had; times in seconds."""

    began: float
    marks: tuple[tuple[Phase, float], ...]
    sequences: int
    tokens: int


class StepProfile:
    """Adds up the time of phases, and writes a trace of the last steps when it is closed.

    Args:
        trace: the file to write.
        now: a monotonic clock in seconds.
    """

    def __init__(self, trace: Path, now: Callable[[], float] = time.perf_counter) -> None:
        self._trace = trace
        self._now = now
        self._seconds = {phase.value: 0.0 for phase in Phase}
        self._steps: deque[_Step] = deque(maxlen=MAX_TRACED_STEPS)
        self._began = now()
        self._marks: list[tuple[Phase, float]] = []

    @property
    def seconds(self) -> Mapping[str, float]:
        """See StepClock."""
        return self._seconds

    def begin(self) -> None:
        """See StepClock."""
        self._marks = []
        self._began = self._now()

    def mark(self, phase: Phase) -> None:
        """See StepClock."""
        self._marks.append((phase, self._now()))

    def end(self, sequences: int, tokens: int) -> None:
        """See StepClock."""
        before = self._began
        for phase, at in self._marks:
            self._seconds[phase.value] += at - before
            before = at
        self._steps.append(_Step(self._began, tuple(self._marks), sequences, tokens))
        self._marks = []

    def close(self) -> None:
        """Write the trace. A file that cannot be written is told in the log and no more."""
        written = self._trace.with_name(self._trace.name + ".new")
        try:
            written.write_text(json.dumps(self._document()), encoding="utf-8")
            os.replace(written, self._trace)
        except OSError as error:
            _log.warning("the trace of the last steps was not written: %s", error)
        else:
            _log.info("the trace of the last %d steps is in %s", len(self._steps), self._trace)

    def _document(self) -> dict[str, object]:
        """Chrome's trace format, its complete events; microseconds since the first step of the trace."""
        zero = self._steps[0].began if self._steps else 0.0

        def event(name: str, began: float, ended: float, **arguments: int) -> dict[str, object]:
            start, end = (round((at - zero) * 1e6, 1) for at in (began, ended))
            return {"name": name, "ph": "X", "ts": start, "dur": end - start, "pid": 1, "tid": 1, "args": arguments}

        events = []
        for step in self._steps:
            last = step.marks[-1][1] if step.marks else step.began
            events.append(event("step", step.began, last, sequences=step.sequences, tokens=step.tokens))
            before = step.began
            for phase, at in step.marks:
                events.append(event(phase.value, before, at))
                before = at
        return {"displayTimeUnit": "ms", "traceEvents": events}
