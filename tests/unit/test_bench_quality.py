"""`scripts/bench quality` with a tiny model: float32 agrees with itself, and few bits do not."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

from support.cpu_kernels import kernels_device
from support.tiny_model import build_tiny_model

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_each_format_is_compared_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels_device()
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    bench = importlib.import_module("_bench_quality")
    folder = build_tiny_model(tmp_path)
    arguments = ["--weights", str(folder), "--pieces", "1", "--length", "32", "--formats", "float32,float32+int4"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert bench.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 piece of 32 tokens from docs/: ")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if "float32" in line]
    figures = {name: [float(each) for each in numbers] for name, *numbers in rows if numbers[0][0].isdigit()}
    plain, own, few = figures["float32, plain transformers"], figures["float32"], figures["float32+int4"]
    assert plain[0] == own[0] == 1
    assert math.isclose(own[1], plain[1], rel_tol=1e-3)
    assert few != own
