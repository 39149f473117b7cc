"""What `scripts/bench steps` and `scripts/bench efficiency` run and make of it, with a tiny model."""

from __future__ import annotations

import asyncio
import importlib
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.tiny_model import build_tiny_model

_SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    return importlib.import_module


@pytest.fixture
def engine(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    bare: ModuleType = script("_bench_engine")
    monkeypatch.setattr(bare.gc, "freeze", lambda: None)
    return bare.BareEngine(build_tiny_model(tmp_path, "llama", seed=1), tokens=4096, running=8, dtype="float32")


def test_a_wave_runs_to_its_end_and_leaves_nothing(script: Any, engine: Any) -> None:
    efficiency = script("_bench_efficiency")
    asked = efficiency.wave(random.Random(1), 4, 20, 6, engine.vocabulary)
    assert engine.wave_s(asked) > 0
    assert engine.wave_s(asked) > 0
    assert engine._runner._members == {}


def test_every_curve_has_a_figure_a_value_and_a_panel(script: Any, engine: Any) -> None:
    steps = script("_bench_steps")
    measured = steps.curves(engine, 128)
    figures = steps.measure(measured, 1)
    assert {name: list(points) for name, points in figures.items()} == {
        "sequences": [1, 2, 4, 8, 12, 16, 24, 32],
        "context": [64, 128],
        "prompt": [1, 16, 32, 64, 96, 128],
        "waiting": [1, 4, 16, 64, 256],
    }
    assert all(ms > 0 for points in figures.values() for ms in points.values())
    picture = ElementTree.fromstring(steps.picture(measured, figures))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 4
    assert steps.table(measured[1], {64: 1.0, 128: 2.25}).splitlines()[2:] == [
        "| tokens of each sequence | 64 | 128 |",
        "| --- | --- | --- |",
        "| ms a step | 1.0 | 2.2 |",
    ]


def test_a_ratio_below_the_least_is_told_by_the_status(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = script("_bench_efficiency").report
    assert report({8: 0.95, 16: 0.91}, 0.9) == 0
    assert report({8: 0.95, 16: 0.89}, 0.9) == 1
    assert "served / bare at c16: 0.89" in capsys.readouterr().out


async def test_events_are_counted_wherever_the_answer_is_cut(script: Any) -> None:
    efficiency = script("_bench_efficiency")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in b"data: 1\n\ndata: 2\n\ndata: 3\n\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await efficiency.served_s(port, efficiency.Wave([[1, 2]], 3)) > 0
        with pytest.raises(SystemExit, match="3"):
            await efficiency.served_s(port, efficiency.Wave([[1, 2]], 4))
