"""`--step-profile` on the real server: phases on the metrics page, and a trace when it ends."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx

from support.server_process import ServerProcess
from tengserve_backend.execution.step_profile import Phase


def test_phases_are_metrics_and_a_trace(tiny_repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    flags = ("--model-repository", str(tiny_repository), "--step-profile", str(folder))
    with ServerProcess(*flags) as server:
        url = server.wait_until_ready()
        body = {"inputs": "Once", "parameters": {"max_new_tokens": 5, "ignore_eos": True}}
        assert httpx.post(f"{url}/infer", json=body, timeout=60).status_code == 200
        page = httpx.get(f"{url}/metrics").text
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    found = re.findall(
        r'^tengserve_step_phase_seconds_total\{model="tiny",phase="(\w+)",version="1"\} (\S+)', page, re.M
    )
    seconds = {phase: float(value) for phase, value in found}
    assert list(seconds) == [phase.value for phase in Phase]
    assert all(value > 0 for value in seconds.values())
    trace = json.loads((folder / "tiny-1.trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert len(steps) == 5
    assert [step["args"]["sequences"] for step in steps] == [1] * 5


def test_phases_are_not_measured_unasked(tiny_server: ServerProcess) -> None:
    assert "tengserve_step_phase_seconds_total{" not in httpx.get(f"{tiny_server.url}/metrics").text
