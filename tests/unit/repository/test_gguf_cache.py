"""The weights cache: made once, found again, made anew when damaged, never half there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from tengserve_backend.artifact_cache import cache_root
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.gguf_cache import converted
from tengserve_backend.repository.source import Progress


class Converter:
    """Stands in for the real one: quick, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, target: Path, progress: Progress) -> None:
        assert list(target.iterdir()) == []
        self.calls += 1
        progress("converting", 0.5)
        (target / "config.json").write_text('{"model_type": "llama"}')
        (target / "model.safetensors").write_bytes(gguf.read_bytes() * 3)


def ignore(_stage: str, _fraction: float) -> None:
    pass


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(range(256)) * 40)
    return file


def test_it_is_made_once_and_found_again(tmp_path: Path, gguf: Path) -> None:
    convert = Converter()
    first = converted(gguf, tmp_path / "cache", convert, ignore)
    second = converted(gguf, tmp_path / "cache", convert, ignore)
    assert first == second
    assert convert.calls == 1
    assert (first / "model.safetensors").read_bytes() == gguf.read_bytes() * 3


def test_it_is_keyed_by_content_and_not_by_name(tmp_path: Path, gguf: Path) -> None:
    convert = Converter()
    entry = converted(gguf, tmp_path / "cache", convert, ignore)
    renamed = gguf.rename(tmp_path / "other.gguf")
    assert converted(renamed, tmp_path / "cache", convert, ignore) == entry
    renamed.write_bytes(renamed.read_bytes()[:-1] + b"x")
    assert converted(renamed, tmp_path / "cache", convert, ignore) != entry
    assert convert.calls == 2


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [_truncate, _empty, _flip, _append, Path.unlink])
def test_a_damaged_file_is_made_anew(tmp_path: Path, gguf: Path, name: str, damage: Callable[[Path], None]) -> None:
    convert = Converter()
    entry = converted(gguf, tmp_path / "cache", convert, ignore)
    whole = {file.name: file.read_bytes() for file in entry.iterdir()}
    damage(entry / name)
    assert converted(gguf, tmp_path / "cache", convert, ignore) == entry
    assert convert.calls == 2
    assert {file.name: file.read_bytes() for file in entry.iterdir()} == whole


@pytest.mark.parametrize("manifest", ["[]", "null", '{"files": {}}', '{"files": []}', '{"files": {"config.json": 3}}'])
def test_a_manifest_of_another_shape_is_damage(tmp_path: Path, gguf: Path, manifest: str) -> None:
    convert = Converter()
    entry = converted(gguf, tmp_path / "cache", convert, ignore)
    (entry / "manifest.json").write_text(manifest)
    converted(gguf, tmp_path / "cache", convert, ignore)
    assert convert.calls == 2


def test_what_a_killed_converter_left_does_not_block(tmp_path: Path, gguf: Path) -> None:
    started = tmp_path / "started"
    context = multiprocessing.get_context("fork")

    def hang(_gguf: Path, target: Path, _progress: Progress) -> None:
        (target / "config.json").write_text("half")
        started.touch()
        threading.Event().wait(60)

    process = context.Process(target=converted, args=(gguf, tmp_path / "cache", hang, ignore))
    process.start()
    assert process.pid is not None
    deadline = threading.Event()
    while not started.exists():
        assert process.is_alive()
        deadline.wait(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert list((tmp_path / "cache" / "gguf").glob("*.partial-*"))
    entry = converted(gguf, tmp_path / "cache", Converter(), ignore, lock_timeout_s=5)
    assert (entry / "config.json").read_text() != "half"
    assert not list((tmp_path / "cache" / "gguf").glob("*.partial-*"))


def test_of_two_at_once_one_converts_and_the_other_waits(tmp_path: Path, gguf: Path) -> None:
    converting, waiting = threading.Event(), threading.Event()
    first, second = Converter(), Converter()

    def slow(source: Path, target: Path, progress: Progress) -> None:
        converting.set()
        assert waiting.wait(30)
        first(source, target, progress)

    def report(stage: str, _fraction: float) -> None:
        if stage.startswith("waiting"):
            waiting.set()

    entries: list[Path] = []
    thread = threading.Thread(target=lambda: entries.append(converted(gguf, tmp_path / "cache", slow, ignore)))
    thread.start()
    assert converting.wait(30)
    entries.append(converted(gguf, tmp_path / "cache", second, report, lock_timeout_s=60))
    thread.join(30)
    assert entries[0] == entries[1]
    assert (first.calls, second.calls) == (1, 0)


def test_waiting_has_an_end(tmp_path: Path, gguf: Path) -> None:
    entry = converted(gguf, tmp_path / "cache", Converter(), ignore)
    (entry / "manifest.json").unlink()
    with (
        filelock.FileLock(entry.with_name(f"{entry.name}.lock")),
        pytest.raises(ConfigurationError, match="another process has been converting"),
    ):
        converted(gguf, tmp_path / "cache", Converter(), ignore, lock_timeout_s=0.01)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, gguf: Path) -> None:
    def fail(_gguf: Path, target: Path, _progress: Progress) -> None:
        (target / "half").touch()
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError, match="no"):
        converted(gguf, tmp_path / "cache", fail, ignore)
    assert [file.suffix for file in (tmp_path / "cache" / "gguf").iterdir()] in ([], [".lock"])


def test_a_full_or_unwritable_cache_says_what_to_do(tmp_path: Path, gguf: Path) -> None:
    def full(_gguf: Path, _target: Path, _progress: Progress) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigurationError, match=r"No space left on device.*set TENGSERVE_CACHE_DIR"):
        converted(gguf, tmp_path / "cache", full, ignore)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"Not a directory.*set TENGSERVE_CACHE_DIR") as caught:
        converted(gguf, tmp_path / "file", Converter(), ignore)
    assert str(tmp_path) not in caught.value.message


def test_a_whole_entry_is_used_without_writing(tmp_path: Path, gguf: Path) -> None:
    entry = converted(gguf, tmp_path / "cache", Converter(), ignore)
    entry.with_name(f"{entry.name}.lock").unlink(missing_ok=True)
    before = sorted(entry.parent.rglob("*"))
    assert converted(gguf, tmp_path / "cache", Converter(), ignore) == entry
    assert sorted(entry.parent.rglob("*")) == before


def test_progress_can_end_it(tmp_path: Path, gguf: Path) -> None:
    class StopError(Exception):
        pass

    def stop(_stage: str, _fraction: float) -> None:
        raise StopError

    with pytest.raises(StopError):
        converted(gguf, tmp_path / "cache", Converter(), stop)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TENGSERVE_CACHE_DIR", raising=False)
    assert cache_root() == tmp_path / ".cache" / "tengserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is ignored")
    assert cache_root() == tmp_path / ".cache" / "tengserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "tengserve"
    monkeypatch.setenv("TENGSERVE_CACHE_DIR", "~/mine")
    assert cache_root() == tmp_path / "mine"
