"""The repository while the server runs: loads and unloads by request, and by looking at the disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.echo_model import EchoModel
from tengserve_backend.errors import (
    ConfigurationError,
    ControlError,
    ErrorCode,
    InvalidRequestError,
    ModelNotFoundError,
    ShuttingDownError,
)
from tengserve_backend.repository.live import LiveRepository, first_sources
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.overlays import Overlays
from tengserve_backend.repository.source import ModelSource, Progress

A_WHILE = 30.0
NAMES = "1", "2", "3"


def add(root: Path, name: str, *versions: str, policy: str = "all: {}", code: str = "") -> Path:
    for version in versions or ("1",):
        (root / name / version).mkdir(parents=True, exist_ok=True)
        (root / name / version / "model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(f'backend: "python"\nversion_policy {{ {policy} }}\n')
    return root / name


class Loader:
    """Makes echo models. Fails for a model.py that says so; waits at `gate` when there is one."""

    def __init__(self) -> None:
        self.asked: list[ModelSource] = []
        self.texts: list[str] = []
        self.gate: threading.Event | None = None
        self.waiting = threading.Semaphore(0)

    def __call__(self, source: ModelSource, progress: Progress) -> EchoModel:
        self.asked.append(source)
        text = (source.version_dir / "model.py").read_text()
        self.texts.append(text)
        if self.gate is not None:
            self.waiting.release()
            assert self.gate.wait(A_WHILE)
        if text == "broken":
            raise ConfigurationError("the model says no")
        return EchoModel(source)


class World:
    """A repository on the disk and what serves it."""

    def __init__(self, root: Path, mode: ControlMode, names: tuple[str, ...]) -> None:
        self.root = root
        self.loader = Loader()
        self.overlays = Overlays()
        self.manager = ModelManager(first_sources(root, mode, names), self.loader, released=self.overlays.release)
        self.manager.load_all()
        self.live = LiveRepository(root, mode, self.manager, self.overlays)

    def states(self) -> list[str]:
        return [f"{s.name}:{s.version}:{s.state.value}:{s.reason}" for s in self.manager.statuses()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(mode: ControlMode = ControlMode.EXPLICIT, *names: str) -> World:
        worlds.append(World(tmp_path, mode, names))
        return worlds[-1]

    yield build
    for made in worlds:
        made.manager.stop()
        made.overlays.close()


def test_explicit_starts_with_what_was_named(tmp_path, world):
    add(tmp_path, "a")
    add(tmp_path, "b")
    assert world().states() == []
    assert world(ControlMode.EXPLICIT, "b", "b").states() == ["b:1:READY:"]
    assert world(ControlMode.EXPLICIT, "*").states() == ["a:1:READY:", "b:1:READY:"]
    assert world(ControlMode.NONE).states() == ["a:1:READY:", "b:1:READY:"]
    with pytest.raises(ConfigurationError, match='no model "c"; it has a, b'):
        world(ControlMode.EXPLICIT, "c")


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
def test_the_other_modes_refuse_requests_in_tritons_words(tmp_path, world, mode):
    add(tmp_path, "a")
    live = world(mode).live
    for call in (live.load, live.unload):
        with pytest.raises(ControlError) as e:
            call("a")
        assert e.value.message.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert f"the model control mode is {mode.value}" in e.value.message
        assert "--model-control-mode explicit" in e.value.message
        assert e.value.code is ErrorCode.UNAVAILABLE


def test_a_model_that_came_later_is_loaded_and_unloaded(tmp_path, world):
    here = world()
    assert here.live.names() == []
    add(tmp_path, "late")
    assert here.live.names() == ["late"]
    here.live.load("late")
    assert here.states() == ["late:1:READY:"]
    here.live.unload("late")
    wait_for(lambda: here.states() == ["late:1:UNAVAILABLE:unloaded"])
    here.live.unload("late")
    here.live.load("late")
    assert here.states() == ["late:1:READY:"]


def wait_for(check: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(3000):
        if check():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen")


def test_unloading_what_is_not_loaded(tmp_path, world):
    add(tmp_path, "idle")
    here = world()
    here.live.unload("idle")
    for name in ("nobody", "../idle", ".", ""):
        with pytest.raises(ModelNotFoundError):
            here.live.unload(name)


@pytest.mark.parametrize("files", [{}, {"1/model.py": b""}])
@pytest.mark.parametrize("name", ["..", ".", "a/../b", "", "x" * 256, "x" * 5000, "a\0", "a\n", "\udcff", ".b", "é"])
def test_a_name_that_no_model_can_have_is_the_clients_fault(tmp_path, world, name, files):
    add(tmp_path, "b")
    with pytest.raises(ControlError, match=r"^failed to load '.*', failed to poll from model repository$") as e:
        world().live.load(name, "{}", files)
    assert e.value.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("name", ["nobody", "x" * 255])
def test_a_model_that_is_not_there_is_not_loaded(tmp_path, world, name):
    add(tmp_path, "b")
    with pytest.raises(ControlError, match=r"^failed to load '.*', failed to poll from model repository$") as e:
        world().live.load(name)
    assert e.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("mode", list(ControlMode))
def test_a_folder_whose_name_is_no_text_is_left_out_and_told_once(tmp_path, world, mode, caplog):
    add(tmp_path, "a")
    os.mkdir(os.fsencode(tmp_path) + b"/\xffb")
    here = world(mode, "*") if mode is ControlMode.EXPLICIT else world(mode)
    assert here.states() == ["a:1:READY:"]
    caplog.clear()
    for _ in range(3):
        assert here.live.names() == ["a"]
    here.live.poll()
    assert caplog.text.count("the folder \\udcffb of the model repository is left out: its name is not UTF-8") == (
        # A poll has looked at the disk, and told of it, when it began.
        0 if mode is ControlMode.POLL else 1
    )


def test_a_failure_is_told_and_what_was_served_stays(tmp_path, world):
    add(tmp_path, "a")
    here = world()
    here.live.load("a")
    add(tmp_path, "a", code="broken")
    text = "^load failed for model 'a': version 1 is at UNAVAILABLE state: the model says no;$"
    with pytest.raises(ControlError, match=text) as e:
        here.live.load("a")
    assert e.value.code is ErrorCode.INVALID_ARG
    assert here.states() == ["a:1:READY:"]
    here.live.unload("a")
    wait_for(lambda: here.states() == ["a:1:UNAVAILABLE:unloaded"])
    with pytest.raises(ControlError, match=text):
        here.live.load("a")
    assert here.states() == ["a:1:UNAVAILABLE:the model says no"]


def test_a_wrong_configuration_is_kept_as_the_reason(tmp_path, world):
    folder = add(tmp_path, "a")
    here = world()
    (folder / "config.pbtxt").write_text("backened: 'python'")
    text = "^failed to load 'a', failed to poll from model repository: a/config.pbtxt:1:1: unknown field"
    with pytest.raises(ControlError, match=text):
        here.live.load("a")
    assert "unknown field" in here.live.failures()["a"]
    add(tmp_path, "a")
    here.live.load("a")
    assert here.live.failures() == {}


def test_the_version_policy_of_now_counts(tmp_path, world):
    add(tmp_path, "a", *NAMES)
    here = world()
    here.live.load("a")
    assert here.states() == ["a:3:READY:", "a:2:READY:", "a:1:READY:"]
    add(tmp_path, "a", *NAMES, policy="latest: { num_versions: 1 }")
    here.live.load("a")
    wait_for(lambda: here.states() == ["a:3:READY:", "a:2:UNAVAILABLE:unloaded", "a:1:UNAVAILABLE:unloaded"])
    add(tmp_path, "a", *NAMES, policy="specific: { versions: [1, 2] }")
    here.live.load("a")
    wait_for(lambda: here.states() == ["a:3:UNAVAILABLE:unloaded", "a:2:READY:", "a:1:READY:"])


def test_a_configuration_of_the_request_replaces_the_one_on_the_disk(tmp_path, world):
    add(tmp_path, "a", *NAMES)
    here = world()
    here.live.load("a", json.dumps({"backend": "python", "max_batch_size": 7, "version_policy": {"all": {}}}))
    assert len(here.states()) == 3
    assert here.manager.config("a")["max_batch_size"] == 7
    here.live.load("a")
    assert here.manager.config("a")["max_batch_size"] == 0
    with pytest.raises(ControlError, match="the configuration of the request breaks the schema"):
        here.live.load("a", '{"max_batch": 1}')
    with pytest.raises(ControlError, match="the configuration of the request is no JSON"):
        here.live.load("a", "{")
    with pytest.raises(ControlError, match="name must be that of the folder"):
        here.live.load("a", '{"name": "b", "backend": "python"}')


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_files_of_the_request_replace_the_folder_and_go_with_the_model(tmp_path, temporary, world):
    add(tmp_path, "a", code="disk")
    here = world()
    config = '{"backend": "python"}'
    here.live.load("a", config, {"7/model.py": b"sent", "7/data/words.txt": b"x", "labels.txt": b"y"})
    assert here.states() == ["a:7:READY:"]
    source = here.loader.asked[-1]
    assert (here.loader.texts[-1], (source.version_dir / "data" / "words.txt").read_text()) == ("sent", "x")
    (private,) = temporary.iterdir()
    assert private.stat().st_mode & 0o077 == 0
    here.live.load("a", config, {"7/model.py": b"anew"})
    wait_for(lambda: len(list(temporary.iterdir())) == 1)
    assert here.loader.asked[-1].version_dir.is_dir()
    here.live.load("a")
    wait_for(lambda: here.states() == ["a:7:UNAVAILABLE:unloaded", "a:1:READY:"] and not list(temporary.iterdir()))
    here.live.load("new", config, {"1/model.py": b""})
    with pytest.raises(ControlError, match="the model says no"):
        here.live.load("new", config, {"1/model.py": b"broken"})
    assert len(list(temporary.iterdir())) == 1
    here.live.unload("new")
    wait_for(lambda: not list(temporary.iterdir()))

    def is_forgotten() -> bool:
        here.live.load("a")
        return here.states() == ["a:7:UNAVAILABLE:unloaded", "a:1:READY:"]

    # It is nowhere any more, so a load forgets it, once its unload has ended; its files go a moment before.
    wait_for(is_forgotten)


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "1/../../x", "1//x", "", "1/", "~/x" * 20, "1\\x", "1/\0", "1/./x", "x" * 256, "1/x\n", "1/é"],
)
def test_no_file_leaves_the_private_folder(tmp_path, temporary, world, path):
    here = world()
    with pytest.raises(InvalidRequestError, match="must have a path in the model's folder"):
        here.live.load("a", '{"backend": "python"}', {"1/model.py": b"", path: b"x"})
    assert list(temporary.iterdir()) == []
    assert here.loader.asked == []


def test_a_path_that_the_system_takes_for_too_long_is_refused(tmp_path, temporary, world):
    with pytest.raises(InvalidRequestError, match=r"^a path of the request is too long"):
        world().live.load("a", "{}", {"/".join(["x" * 255] * 16): b""})
    assert list(temporary.iterdir()) == []


def test_files_that_are_too_many_or_in_each_others_way(temporary, world, monkeypatch):
    here = world()
    with pytest.raises(InvalidRequestError, match="is a folder of another one"):
        here.live.load("a", "{}", {"1/x": b"", "1/x/y": b""})
    with pytest.raises(InvalidRequestError, match="at most 1024 files"):
        here.live.load("a", "{}", {f"1/{number}": b"" for number in range(1025)})
    monkeypatch.setattr("tengserve_backend.repository.overlays.MAX_BYTES", 10)
    with pytest.raises(InvalidRequestError, match="of together 10 bytes"):
        here.live.load("a", "{}", {"1/x": bytes(11)})
    with pytest.raises(ControlError, match="requires a model config"):
        here.live.load("a", None, {"1/model.py": b""})
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("code", ["", "broken"])
def test_concurrent_loads_are_one(tmp_path, world, code):
    add(tmp_path, "a", "1", "2", code=code)
    here = world()
    here.loader.gate = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(here.live.load, "a") for _ in range(4)]
        assert here.loader.waiting.acquire(timeout=A_WHILE)
        (flight,) = here.live._flights.values()
        wait_for(lambda: len(flight.done._cond._waiters) == 3)
        here.loader.gate.set()
        results = [type(load.exception(A_WHILE)) for load in loads]
    assert results == [ControlError if code else type(None)] * 4
    assert [source.version for source in here.loader.asked] == ["1", "2"]


def test_a_load_of_changed_files_does_not_join_one_of_the_old_ones(tmp_path, world):
    add(tmp_path, "a", code="old")
    here = world()
    here.loader.gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(here.live.load, "a", '{"backend": "python"}')
        assert here.loader.waiting.acquire(timeout=A_WHILE)
        add(tmp_path, "a", code="newer")
        second = pool.submit(here.live.load, "a", '{"backend": "python", "max_batch_size": 1}')
        here.loader.gate.set()
        assert [first.result(A_WHILE), second.result(A_WHILE)] == [None, None]
    assert here.loader.texts == ["old", "newer"]


def test_nothing_is_loaded_by_a_server_that_stops(tmp_path, world):
    add(tmp_path, "a")
    here = world()
    here.manager.stop()
    with pytest.raises(ShuttingDownError):
        here.live.load("a")


def test_polling(tmp_path, world):
    add(tmp_path, "a")
    here = world(ControlMode.POLL)
    here.live.poll()
    assert len(here.loader.asked) == 1
    folder = add(tmp_path, "b", code="broken")
    here.live.poll()
    assert here.states() == ["a:1:READY:", "b:1:UNAVAILABLE:the model says no"]
    here.live.poll()
    assert len(here.loader.asked) == 2
    (folder / "config.pbtxt").write_text("wrong")
    here.live.poll()
    assert list(here.live.failures()) == ["b"]
    add(tmp_path, "b", code="fine")
    here.live.poll()
    assert here.states() == ["a:1:READY:", "b:1:READY:"]
    assert here.live.failures() == {}
    os.rename(tmp_path / "a", tmp_path / ".a")
    here.live.poll()
    wait_for(lambda: here.states() == ["a:1:UNAVAILABLE:unloaded", "b:1:READY:"])
    add(tmp_path, "c", *NAMES)
    here.live.poll()
    assert [state for state in here.states() if "READY" in state] == [
        "b:1:READY:",
        "c:3:READY:",
        "c:2:READY:",
        "c:1:READY:",
    ]
