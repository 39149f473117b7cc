"""The report: what was seen and nothing more, in plain text."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from tengserve_backend.devices.npu.environment import REPORTED, is_simulated
from tengserve_backend.devices.npu.guard import import_torch
from tengserve_backend.devices.npu.versions import installed_versions
from tengserve_backend.errors import ConfigurationError, DeviceLostError, shown
from tengserve_backend.repository.source import ModelSource

_GIB = 2**30
_MAX_TEXT_CHARS = 200
_MAX_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it.

    Attributes:
        text: to be pasted into an issue, with its fence.
        passed: everything that was tried was right, and something was.
        device_lost: the process should end without the interpreter's end, where torch-npu waits for the device.
    """

    text: str
    passed: bool
    device_lost: bool


class _Findings:
    """Lines, and whether something was wrong."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.lines: list[str] = []
        self.wrong: list[str] = []
        self.device_lost = False
        self._say = say

    def add(self, line: str) -> None:
        self.lines.append(line)
        self._say(line)

    def fault(self, what: str, line: str) -> None:
        self.wrong.append(what)
        self.add(line)


def self_check(index: int, source: ModelSource | None, say: Callable[[str], None]) -> Report:
    """Look at an NPU, try its operators and let a model answer. Blocks for seconds to minutes.

    Args:
        index: which NPU, among those that the process sees.
        source: the model; None runs none.
        say: called with each line as soon as it is known, so that a hang shows where.
    """
    found = _Findings(say)
    for line in _machine():
        found.add(line)
    readiness = import_torch()
    if not readiness.usable:
        found.fault("no NPU", f"npu: cannot be used: {readiness.reason}")
        return _report(found)
    # Imported here because they bring torch, which had to wait.
    from tengserve_backend.devices.npu.errors import is_fault
    from tengserve_backend.npu_selfcheck.operators import said

    part = "the device"
    try:
        _check_device(index, found)
        part = "the model"
        if source is None:
            found.add("model: none was run")
        elif not found.device_lost:
            _check_model(index, source, found)
    except Exception as error:  # noqa: BLE001  # whatever happens on hardware that nobody has seen belongs into the report
        found.device_lost = isinstance(error, DeviceLostError) or is_fault(error)
        what = "cannot be used" if isinstance(error, ConfigurationError) else "failed"
        found.fault(part, f"{part} {what}: {said(error)}")
    return _report(found)


def _report(found: _Findings) -> Report:
    passed = not found.wrong
    verdict = "passed" if passed else f"FAILED ({', '.join(dict.fromkeys(found.wrong))})"
    if is_simulated(os.environ):
        verdict += " on a SIMULATED NPU: no chip was used, so this says nothing about hardware"
    text = "\n".join(["```text", f"tengserve npu-selfcheck: {verdict}", *found.lines, "```"])
    return Report(text, passed, found.device_lost)


def _machine() -> Iterator[str]:
    yield (
        f"versions: tengserve {metadata.version('tengserve')}, Python {platform.python_version()}, "
        f"transformers {metadata.version('transformers')}, {installed_versions(os.environ)}"
    )
    yield f"machine: {platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"
    named = [f"{name}={shown(os.environ[name], _MAX_VALUE_CHARS)}" for name in REPORTED if name in os.environ]
    yield f"environment: {', '.join(named) or 'nothing is set'}"


def _check_device(index: int, found: _Findings) -> None:
    import torch

    from tengserve_backend.devices.npu.device import NpuDevice
    from tengserve_backend.devices.npu.operators import capabilities
    from tengserve_backend.devices.select import select_device
    from tengserve_backend.npu_selfcheck.operators import check_operators

    device = select_device(f"npu:{index}")
    assert isinstance(device, NpuDevice)  # noqa: S101  # what that name selects
    free, total = device.memory()
    found.add(f"device: {device.name}, {device.soc}, {device.family.value}")
    found.add(f"memory: {free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB")
    dtypes = (torch.float16, torch.bfloat16) if device.has_bfloat16 else (torch.float16,)
    found.add(f"number formats: float32, {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}")
    found.add("operators against the CPU in float32, by the largest difference as a share of the largest element:")
    for result in check_operators(device, dtypes, capabilities()):
        head = f"  {result.operator}, {result.what}"
        if not result.tried:
            found.add(f"{head}: not tried: {result.reason}")
            continue
        head = f"{head}, {result.dtype}"
        if result.share is None:
            found.fault("an operator", f"{head}: failed: {result.reason}")
        elif result.right:
            found.add(f"{head}: {result.share:.3%}, right (bound {result.bound:.0%})")
        else:
            found.fault("an operator", f"{head}: {result.share:.3%}, WRONG (bound {result.bound:.0%})")
        found.device_lost = result.lost


def _check_model(index: int, source: ModelSource, found: _Findings) -> None:
    from tengserve_backend.engine.load import load_engine
    from tengserve_backend.npu_selfcheck.generation import AT_ONCE, NEW_TOKENS, PROMPT, generate
    from tengserve_backend.repository.weights import resolve_weights

    settings = dataclasses.replace(source.settings, device=f"npu:{index}")
    source = dataclasses.replace(source, settings=settings)
    engine = load_engine(source, resolve_weights(source, _unseen), _unseen)
    try:
        result = asyncio.run(generate(engine))
    finally:
        engine.stop()
    info = result.info
    found.add(
        f"model: {info.name}, {info.architecture} in {info.dtype} on {info.device}, attention {info.attention_tier}"
    )
    found.add(f"  prompt: {PROMPT}")
    found.add(f"  answer: {shown(result.text, _MAX_TEXT_CHARS)}")
    found.add(
        f"  {NEW_TOKENS} tokens alone: the first after {result.first_s:.3f} s, then {result.tokens_per_s:.1f} tokens/s"
    )
    found.add(f"  {AT_ONCE} requests at once: {result.tokens_per_s_at_once:.1f} tokens/s together")


def _unseen(stage: str, fraction: float) -> None:
    """Progress of the load; the report has its own lines."""
