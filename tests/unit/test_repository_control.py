"""ModelControl over a real repository of echo models, and the threads that it works in."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.echo_model import EchoModel
from tengserve_adapter.control import IndexRow
from tengserve_adapter.repository_control import RepositoryControl
from tengserve_adapter.threads import MAX_RUNNING, Threads
from tengserve_backend.errors import (
    ConfigurationError,
    ControlError,
    ErrorCode,
    ModelNotFoundError,
    OverloadedError,
    ShuttingDownError,
)
from tengserve_backend.repository.live import LiveRepository
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.overlays import Overlays
from tengserve_backend.repository.source import ModelSource, Progress

A_WHILE = 30.0


def add(root: Path, name: str, code: str = "", config: str = 'backend: "python"') -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "1" / "model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(config)


def load(source: ModelSource, progress: Progress) -> EchoModel:
    if (source.version_dir / "model.py").read_text() == "broken":
        raise ConfigurationError("the model says no")
    return EchoModel(source)


class Served:
    def __init__(self, root: Path, mode: ControlMode = ControlMode.EXPLICIT) -> None:
        overlays = Overlays()
        self.draining = False
        self.manager = ModelManager([], load, released=overlays.release)
        self.manager.load_all()
        live = LiveRepository(root, mode, self.manager, overlays)
        self.control = RepositoryControl(live, self.manager, draining=lambda: self.draining)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.manager.stop()


async def test_the_index_tells_what_is_served_what_failed_and_what_is_only_there(
    served: Served, tmp_path: Path
) -> None:
    for name in ("good", "idle"):
        add(tmp_path, name)
    add(tmp_path, "bad", "broken")
    add(tmp_path, "wrong", config="backened: 'python'")
    await served.control.load("good", None, {})
    for name in ("bad", "wrong"):
        with pytest.raises(ControlError):
            await served.control.load(name, None, {})
    rows = await served.control.index(ready_only=False)
    assert rows[:3] == [
        IndexRow("bad", "1", "UNAVAILABLE", "the model says no"),
        IndexRow("good", "1", "READY"),
        IndexRow("idle"),
    ]
    assert (rows[3].name, rows[3].state) == ("wrong", "UNAVAILABLE")
    assert "unknown field" in rows[3].reason
    assert await served.control.index(ready_only=True) == [IndexRow("good", "1", "READY")]


async def test_configuration_and_statistics(served: Served, tmp_path: Path) -> None:
    add(tmp_path, "good")
    await served.control.load("good", None, {})
    config = served.control.config("good", "")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("good", "python", 0)
    assert [row["name"] for row in served.control.statistics("", "")] == ["good"]
    for name, version in (("nobody", ""), ("good", "2")):
        with pytest.raises(ModelNotFoundError, match="Request for unknown model: "):
            served.control.config(name, version)
        with pytest.raises(ControlError, match="is not available") as error:
            served.control.statistics(name, version)
        assert error.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(ModelNotFoundError, match="Request for unknown model: 'nobody' is not found"):
        await served.control.unload("nobody", unload_dependents=False)


async def test_nothing_begins_while_the_server_drains(served: Served, tmp_path: Path) -> None:
    add(tmp_path, "good")
    served.draining = True
    with pytest.raises(ShuttingDownError):
        await served.control.load("good", None, {})
    with pytest.raises(ShuttingDownError):
        await served.control.unload("good", unload_dependents=False)


async def test_the_log_tells_how_each_change_ended_and_nothing_that_a_client_sent(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tengserve_adapter")
    add(tmp_path, "good")
    add(tmp_path, "bad", "broken")
    secret = '{"backend": "python", "parameters": {"key": {"string_value": "hunter2"}}}'
    await served.control.load("good", secret, {"1/model.py": b"# hunter2"})
    await served.control.unload("good", unload_dependents=False)
    with pytest.raises(ControlError):
        await served.control.load("bad", secret, {})
    with pytest.raises(ModelNotFoundError):
        await served.control.unload("nobody", unload_dependents=False)
    served.draining = True
    with pytest.raises(ShuttingDownError):
        await served.control.load("good", None, {})
    told = [record.getMessage() for record in caplog.records if record.name.startswith("tengserve_adapter")]
    patterns = [
        r"model good: loaded for a client in \d+\.\d s",
        r"model good: unloaded for a client in \d+\.\d s",
        r"model bad: a client's load failed: .*the model says no.*",
        r"model nobody: a client's unload was refused: .*",
        r"model good: a client's load was refused: The server is stopping\.",
    ]
    assert len(told) == len(patterns)
    for line, pattern in zip(told, patterns, strict=True):
        assert re.fullmatch(pattern, line), line
    assert "hunter2" not in caplog.text


async def test_the_log_tells_that_the_mode_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(tmp_path, ControlMode.NONE)
    with pytest.raises(ControlError):
        await served.control.load("good", None, {})
    assert "model good: a client's load was refused: explicit model load" in caplog.text
    assert "the model control mode is none" in caplog.text


async def test_polling_goes_on_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    served = Served(root, ControlMode.POLL)
    async with asyncio.timeout(A_WHILE), served.control.polling(0.01):
        root.rmdir()
        while "was not polled" not in caplog.text:  # noqa: ASYNC110 - a log sets no event
            await asyncio.sleep(0.01)
        add(root, "good")
        while not await served.control.index(ready_only=True):  # noqa: ASYNC110 - nor does a model
            await asyncio.sleep(0.01)
    served.manager.stop()


async def test_threads_are_bounded_and_go_on_without_their_caller() -> None:
    threads, gate, ended = Threads("looks at"), threading.Event(), threading.Semaphore(0)

    def work() -> int:
        assert gate.wait(A_WHILE)
        ended.release()
        return 7

    tasks = [asyncio.create_task(threads.run(work)) for _ in range(MAX_RUNNING)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="Too many looks at the model repository at once"):
        await threads.run(work)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gate.set()
    assert await asyncio.gather(*tasks[1:]) == [7] * (MAX_RUNNING - 1)
    for _ in range(MAX_RUNNING):
        assert await asyncio.to_thread(ended.acquire, timeout=A_WHILE)
    assert await threads.run(lambda: "more") == "more"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
