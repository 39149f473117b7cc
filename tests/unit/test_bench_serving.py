"""The reference of `scripts/bench serving`: plain answers in the dtype in which the model is served."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support.model_folders import add_model
from support.tiny_model import build_tiny_model
from tengserve_backend.devices.select import select_device

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [({"dtype": "float16"}, "float16"), ({"device": "cpu", "cpuKernels": "off"}, "float32"), ({"device": "cpu"}, None)],
)
def test_served_is_what_the_settings_and_the_machine_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], wanted: str | None
) -> None:
    import torch

    folder = build_tiny_model(add_model(tmp_path, "tiny", parameters=parameters))
    default = str(select_device("cpu").default_dtype(torch.float32)).removeprefix("torch.")
    assert script(monkeypatch, "_bench_reference").served_dtype(tmp_path, folder) == (wanted or default)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ((), "served"),
        (("--dtype", "float16"), "float16"),
        (("--url", "http://h"), "float32"),
        (("--url", "http://h", "--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_the_reference_of_a_server_of_its_own_is_as_it_serves_and_can_be_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    dtype: str,
) -> None:
    bench = script(monkeypatch, "_bench_serving")
    build_tiny_model(add_model(tmp_path, "tiny"))
    commands: list[list[str]] = []
    monkeypatch.setattr(
        bench,
        "subprocess",
        SimpleNamespace(run=lambda command, **_: commands.append(command), DEVNULL=subprocess.DEVNULL),
    )
    monkeypatch.setattr(bench, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))
    monkeypatch.setattr(bench, "own_server", lambda *_, **__: nullcontext("http://h:1"))
    monkeypatch.setattr(bench, "run", lambda options, _: 0 if options.agreement is None else 1)
    monkeypatch.setattr(sys, "argv", ["bench", "--model-repository", str(tmp_path), *flags])
    assert bench.main() == 0
    assert [command[command.index("--dtype") + 1] for command in commands] == [dtype]
    _, _, file, *rest = commands[0]
    told = capsys.readouterr().err
    assert f"scripts/bench reference FILE {shlex.join(rest)} keeps them, for --reference FILE" in told
    assert file not in told
