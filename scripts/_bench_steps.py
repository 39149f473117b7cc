"""Step time against sequences, context, tokens of a prompt, and requests that wait; as a table, JSON and a picture.

Every curve is measured once a round, its points in turn, and a point is the median of its rounds. A curve that jumps
where nothing is to be seen in the next run is the machine's doing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench_engine import BareEngine
from _bench_weights import REPOSITORY, weights_folder

from tengserve_adapter.bench.chart import Panel, Point, svg

_CONTEXT = 128
"""Tokens of each sequence where they are not what changes."""
_SEQUENCES = 4
"""Sequences of a step where they are not what changes."""
_RUNNING = 8
"""Sequences that run while others wait."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What is measured.

    Attributes:
        name: of the JSON.
        title: of the panel.
        x_title: what changes.
        values: what it is changed to, ascending.
        seconds: of one step at a value.
    """

    name: str
    title: str
    x_title: str
    values: Sequence[int]
    seconds: Callable[[int], float]


def curves(engine: BareEngine, longest: int) -> list[Curve]:
    """All of them; contexts and prompts are no longer than `longest`."""

    def up_to(*values: int) -> list[int]:
        return [value for value in values if value <= longest]

    return [
        Curve(
            "sequences",
            f"a token of each sequence, context {_CONTEXT}",
            "sequences",
            (1, 2, 4, 8, 12, 16, 24, 32),
            lambda value: engine.step_s(value, _CONTEXT),
        ),
        Curve(
            "context",
            f"a token of each of {_SEQUENCES} sequences",
            "tokens of each sequence",
            up_to(64, 128, 256, 512, 1024, 2048, 4096),
            lambda value: engine.step_s(_SEQUENCES, value),
        ),
        Curve(
            "prompt",
            "one prompt",
            "tokens of the prompt",
            up_to(1, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048),
            lambda value: engine.step_s(1, value, tokens=value),
        ),
        Curve(
            "waiting",
            f"a token of each of {_RUNNING} sequences, others wait",
            "requests that wait",
            (1, 4, 16, 64, 256),
            lambda value: waiting_s(engine, value),
        ),
    ]


def waiting_s(engine: BareEngine, waiting: int) -> float:
    """Seconds of one turn of the scheduler and the model while as many sequences run as may, and others wait."""
    scheduler = engine.scheduler()
    requests = [engine.request([100 + index]) for index in range(engine.running + waiting)]
    for request in requests:
        scheduler.add(request)
    engine.run_step(scheduler)
    began = time.perf_counter()
    step = engine.run_step(scheduler)
    seconds = time.perf_counter() - began
    assert (scheduler.waiting, len(step.sequences)) == (waiting, engine.running)
    for request in requests:
        engine.end(scheduler, request)
    return seconds


def measure(measured: Sequence[Curve], rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds by curve and value."""
    seconds: dict[str, dict[int, list[float]]] = {
        curve.name: {value: [] for value in curve.values} for curve in measured
    }
    for number in range(rounds + 1):
        for curve in measured:
            for value in curve.values:
                once = curve.seconds(value)
                if number:  # The first round finds memory and caches as nothing left them.
                    seconds[curve.name][value].append(once)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return {
        name: {value: statistics.median(samples) * 1e3 for value, samples in points.items()}
        for name, points in seconds.items()
    }


def table(curve: Curve, milliseconds: Mapping[int, float]) -> str:
    """A curve in Markdown."""
    head = [curve.x_title, *map(str, milliseconds)]
    row = ["ms a step", *(f"{value:.1f}" for value in milliseconds.values())]
    lines = (head, ["---"] * len(head), row)
    return f"{curve.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def picture(measured: Sequence[Curve], figures: Mapping[str, Mapping[int, float]]) -> str:
    """All curves, two in a row."""
    panels = [
        Panel(
            f"{curve.title}, ms",
            curve.x_title,
            {"step": [Point(value, ms, str(value)) for value, ms in figures[curve.name].items()]},
        )
        for curve in measured
    ]
    return svg(["step"], [panels[first : first + 2] for first in range(0, len(panels), 2)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench steps", description=__doc__)
    parser.add_argument(
        "--model-repository", type=Path, default=REPOSITORY, help="its only LLM is run (default: the quick start's)"
    )
    parser.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    parser.add_argument("--rounds", type=int, default=7, help="how often each point is measured (default 7)")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest sequence (default 4096)")
    parser.add_argument("--only", action="append", help="a curve: sequences, context, prompt or waiting; repeatable")
    parser.add_argument("--out", type=Path, help="a folder for steps.json and steps.svg")
    options = parser.parse_args()
    if not (1 <= options.rounds <= 100 and 64 <= options.longest <= 2**17):
        parser.error("it takes 1 to 100 rounds and a longest sequence of 64 to 131072 tokens")
    engine = BareEngine(
        weights_folder(options.model_repository),
        tokens=max(_SEQUENCES * options.longest, 32 * _CONTEXT),
        running=_RUNNING,
        dtype=options.dtype,
    )
    measured = curves(engine, options.longest)
    if options.only:
        measured = [curve for curve in measured if curve.name in options.only]
    if not measured:
        parser.error(f"there is no curve {', '.join(options.only)}")
    figures = measure(measured, options.rounds)
    load = os.getloadavg()[0]
    print(f"{engine.description}; load average {load:.1f}; medians of {options.rounds}\n")
    for curve in measured:
        print(table(curve, figures[curve.name]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load_average": load}
        document = {"engine": engine.description, "machine": machine, "rounds": options.rounds, "ms": figures}
        (options.out / "steps.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (options.out / "steps.svg").write_text(picture(measured, figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
