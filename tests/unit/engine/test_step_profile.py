"""Where the time of a step goes: sums by phase, the trace, and an engine that is measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from support.scripted_model import says, scripted_engine
from tengserve_backend.engine.statistics import StatisticsRecorder
from tengserve_backend.execution import step_profile
from tengserve_backend.execution.step_profile import NoClock, Phase, StepProfile
from tengserve_backend.generation import GenerationRequest

_EOS = 299


class Times:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_step(profile: StepProfile, times: Times, *parts: tuple[Phase, float], sequences: int = 1) -> None:
    profile.begin()
    for phase, seconds in parts:
        times.now += seconds
        profile.mark(phase)
    profile.end(sequences, 2 * sequences)


def events(trace: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(trace.read_text())["traceEvents"]
    return found


def test_time_between_marks_belongs_to_the_phase_that_ends_it(tmp_path: Path) -> None:
    times = Times()
    profile = StepProfile(tmp_path / "trace.json", times)
    run_step(profile, times, (Phase.SCHEDULE, 0.5), (Phase.FORWARD, 2.0), (Phase.SCHEDULE, 0.25))
    times.now += 50.0  # Nothing to do: nobody's time.
    run_step(profile, times, (Phase.FORWARD, 1.0))
    assert profile.seconds == {
        "schedule": 0.75,
        "prepare": 0.0,
        "forward": 3.0,
        "sample": 0.0,
        "detokenize": 0.0,
        "deliver": 0.0,
    }


def test_a_step_that_does_not_end_is_nobody_s_time(tmp_path: Path) -> None:
    times = Times()
    profile = StepProfile(tmp_path / "trace.json", times)
    profile.begin()
    times.now += 5.0
    profile.mark(Phase.SCHEDULE)
    run_step(profile, times, (Phase.FORWARD, 1.0))
    assert sum(profile.seconds.values()) == 1.0


def test_the_trace_has_steps_and_their_phases_in_microseconds(tmp_path: Path) -> None:
    times, trace = Times(), tmp_path / "trace.json"
    profile = StepProfile(trace, times)
    run_step(profile, times, (Phase.SCHEDULE, 0.5), (Phase.FORWARD, 2.0), sequences=3)
    times.now += 1.0
    run_step(profile, times, (Phase.FORWARD, 1.0))
    profile.close()
    shown = [(event["name"], event["ph"], event["ts"], event["dur"], event["args"]) for event in events(trace)]
    assert shown == [
        ("step", "X", 0.0, 2_500_000.0, {"sequences": 3, "tokens": 6}),
        ("schedule", "X", 0.0, 500_000.0, {}),
        ("forward", "X", 500_000.0, 2_000_000.0, {}),
        ("step", "X", 3_500_000.0, 1_000_000.0, {"sequences": 1, "tokens": 2}),
        ("forward", "X", 3_500_000.0, 1_000_000.0, {}),
    ]


def test_the_trace_holds_the_last_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "MAX_TRACED_STEPS", 3)
    times, trace = Times(), tmp_path / "trace.json"
    profile = StepProfile(trace, times)
    for sequences in range(1, 6):
        run_step(profile, times, (Phase.FORWARD, 1.0), sequences=sequences)
    profile.close()
    assert [event["args"]["sequences"] for event in events(trace) if event["name"] == "step"] == [3, 4, 5]
    assert profile.seconds["forward"] == 5.0


def test_a_trace_that_cannot_be_written_is_told_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StepProfile(tmp_path / "gone" / "trace.json").close()
    assert "was not written" in caplog.text


def test_without_a_profile_there_are_no_phases() -> None:
    assert StatisticsRecorder(NoClock().seconds).snapshot().phase_seconds == {}


async def test_an_engine_tells_its_phases_and_writes_its_trace(tmp_path: Path) -> None:
    ticks = itertools.count()
    trace = tmp_path / "m-1.trace.json"
    profile = StepProfile(trace, lambda: float(next(ticks)))
    engine = scripted_engine(says("hello", 2, then=_EOS), eos_ids=[_EOS], clock=profile)
    try:
        generation = await engine.submit(GenerationRequest(request_id="r", prompt="ab", max_new_tokens=20))
        answered = [event async for event in generation]
    finally:
        engine.stop()
    # Read after the end: the last step's delivery is counted once it is done.
    statistics = engine.status().statistics
    steps = statistics.step_seconds.count
    assert len(answered) == steps == 6
    # One tick a mark, and the schedule is marked before and after the forward.
    assert statistics.phase_seconds == {
        "schedule": 2.0 * steps,
        "prepare": steps,
        "forward": steps,
        "sample": steps,
        "detokenize": steps,
        "deliver": steps,
    }
    names = [event["name"] for event in events(trace)]
    one_step = ["step", "schedule", "prepare", "forward", "sample", "schedule", "detokenize", "deliver"]
    assert names == one_step * steps
