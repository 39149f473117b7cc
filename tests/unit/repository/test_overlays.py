"""Files of load requests, when the process that owns them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tengserve_backend.repository.overlays import Overlays, remove_left_behind

OWNER = """
import sys
from tengserve_backend.repository.overlays import Overlays
print(Overlays().write("m", {"1/model.py": b"x"}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has written a model's files, and the folder of the model."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_files_go_when_their_process_was_killed_and_not_before(temporary: Path) -> None:
    with owner() as (process, folder):
        assert (folder / "1" / "model.py").read_bytes() == b"x"
        assert temporary in folder.parents
        remove_left_behind()
        assert (folder / "1" / "model.py").is_file()
        process.kill()
        process.wait()
        assert (folder / "1" / "model.py").is_file()
        remove_left_behind()
        assert list(temporary.iterdir()) == []


def test_files_of_this_process_stay(temporary: Path) -> None:
    overlays = Overlays()
    folder = overlays.write("m", {"1/model.py": b"x"})
    remove_left_behind()
    assert (folder / "1" / "model.py").is_file()
    overlays.close()
    overlays.close()
    assert list(temporary.iterdir()) == []
    again = overlays.write("m", {"x": b""})
    overlays.drop(again)
    assert list(temporary.iterdir()) == []


def test_what_is_not_known_to_be_a_dead_server_s_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    (temporary / "tengserve-models-new").mkdir()
    (temporary / "tengserve-models-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (temporary / "tengserve-models-link").symlink_to(elsewhere)
    locked = temporary / "tengserve-models-linked-lock"
    locked.mkdir()
    (locked / "lock").symlink_to(elsewhere / "lock")
    there = sorted(os.listdir(temporary))
    remove_left_behind()
    assert sorted(os.listdir(temporary)) == there
    assert (elsewhere / "lock").exists()
