"""Read a model repository: Triton's layout, one folder a model, config.pbtxt and numbered version folders in it."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.config_json import normalized
from tengserve_backend.repository.pbtxt import ConfigFile, new_config, read_config
from tengserve_backend.repository.python_models import MODEL_FILE, check_python_config, model_file
from tengserve_backend.repository.settings import ModelSettings, read_settings
from tengserve_backend.repository.source import Backend, ModelSource

CONFIG_FILE = "config.pbtxt"

_log = logging.getLogger(__name__)

_A_MODEL = (
    f"the model repository has a {CONFIG_FILE} itself, so it is a model's own folder: name the folder above it instead"
)

_MAX_PATH_CHARS = 1000

# No file system has folders with longer names.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_FILE_SYSTEM_FOLDERS = {"lost+found"}
"""What a freshly made volume has at its root."""

_EFFECTIVE_FIELDS = {"name", "backend", "max_batch_size", "version_policy", "parameters", "model_transaction_policy"}
"""Fields of ModelConfig that mean something for an LLM. Any other is refused rather than silently ignored."""

_FIELD_ADVICE = {
    "input": "the inputs of an LLM are fixed",
    "output": "the outputs of an LLM are fixed",
    "instance_group": "the parameter device says where the model runs",
    "dynamic_batching": "requests are always batched; see the parameters maxBatchSize and maxWaitingRequests",
}


def scan_repository(root: Path) -> tuple[ModelSource, ...]:
    """Every version that is to be served, by model name and version.

    Hidden entries and stray files are ignored, so volumes with their bookkeeping folders can be served as they are.

    Raises:
        ConfigurationError: the repository is no folder, has no model, or a model's folder or config.pbtxt is wrong.
    """
    where = check_repository(root)
    sources = [source for folder in model_folders(root) for source in scan_model(folder)]
    if not sources and (root / CONFIG_FILE).is_file():
        raise ConfigurationError(_A_MODEL)
    if not sources:
        raise ConfigurationError(
            f"{where} has no model: it takes a folder per model, with a {CONFIG_FILE} and a "
            f"version folder such as 1/ in it"
        )
    return tuple(sources)


def check_repository(root: Path) -> str:
    """The repository as errors call it.

    Raises:
        ConfigurationError: it is no folder, or cannot be looked at.
    """
    where = f'the model repository "{shown(str(root), _MAX_PATH_CHARS)}"'
    if not _is(root, stat.S_ISDIR, where):
        raise ConfigurationError(f"{where} is not a folder")
    return where


def warn_of_name(name: str) -> None:
    """Tell the operator of a folder whose name is no text."""
    _log.warning("the folder %s of the model repository is left out: its name is not UTF-8", shown(name))


def model_folders(root: Path, no_text: Callable[[str], None] = warn_of_name) -> list[Path]:
    """The folders of the models, by name, whatever is in them.

    Args:
        root: the repository.
        no_text: called with each name that is not UTF-8. Such a folder is left out: no client could be told of it.

    Raises:
        ConfigurationError: the repository cannot be read.
    """
    folders = []
    for folder in _folders(root, "the model repository"):
        try:
            folder.name.encode()
        except UnicodeEncodeError:
            no_text(folder.name)
            continue
        if folder.name not in _FILE_SYSTEM_FOLDERS:
            folders.append(folder)
    return folders


def is_model_name(name: str) -> bool:
    """Whether a model may be called so."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".") and name not in _FILE_SYSTEM_FOLDERS


def _folders(parent: Path, what: str) -> list[Path]:
    """Folders in a folder, hidden ones left out, symbolic links followed."""
    try:
        return sorted(entry for entry in parent.iterdir() if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read ({error.strerror})") from error


def _is(path: Path, kind: Callable[[int], bool], what: str) -> bool:
    """Whether there is something of this kind; a path that cannot be looked at is the operator's to mend."""
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read ({error.strerror})") from error


def scan_model(folder: Path) -> list[ModelSource]:
    """The versions of one model that are to be served, oldest first.

    Raises:
        ConfigurationError: the folder or its config.pbtxt is wrong.
    """
    name = folder.name
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f'a model\'s folder must be named with 1 to 255 letters, digits, ".", "_" or "-", not "{shown(name)}"'
        )
    config_file = _config_of(folder)
    return model_sources(folder, config_file)


def _config_of(folder: Path) -> ConfigFile:
    """A model's configuration; one with a model.py needs none."""
    file = f"{folder.name}/{CONFIG_FILE}"
    if (folder / CONFIG_FILE).is_file():
        return read_config(folder / CONFIG_FILE, file)
    if _has_model_file(folder):
        return ConfigFile(file, new_config(), {}, {})
    if _VERSION.fullmatch(folder.name) and (folder.parent / CONFIG_FILE).is_file():
        raise ConfigurationError(_A_MODEL)
    raise ConfigurationError("the file is missing: each model's folder needs one", file=file)


def _has_model_file(folder: Path) -> bool:
    return any(_VERSION.fullmatch(found.parent.name) for found in folder.glob(f"*/{MODEL_FILE}"))


def model_sources(folder: Path, config_file: ConfigFile) -> list[ModelSource]:
    """The versions of one model that its configuration has served, oldest first.

    Args:
        folder: the model's.
        config_file: of the folder, or what a load request put in its place.

    Raises:
        ConfigurationError: the folder or the configuration is wrong.
    """
    name, file, config = folder.name, config_file.file, config_file.config
    if not config.backend and _has_model_file(folder):
        config.backend = Backend.PYTHON.value
    backend = _check_backend(name, config_file)
    if backend is Backend.TENGSERVE:
        _check_config(config_file)
        settings = read_settings(config_file.parameters, file=file, lines=config_file.lines)
    else:
        check_python_config(config, file)
        settings = ModelSettings()
    sources = []
    for version in map(str, _served_versions(folder, config_file)):
        if backend is Backend.PYTHON and not (folder / version / model_file(config, file)).is_file():
            raise ConfigurationError(f"version {version} has no {model_file(config, file)}", file=file)
        sources.append(ModelSource(name, version, folder / version, settings, backend, normalized(config, name)))
    return sources


def _check_backend(name: str, config_file: ConfigFile) -> Backend:
    config, file = config_file.config, config_file.file
    if config.name not in ("", name):
        raise ConfigurationError(
            f'name must be that of the folder, "{name}", or be left out, not "{shown(config.name)}"', file=file
        )
    try:
        return Backend(config.backend)
    except ValueError:
        given = f'not "{shown(config.backend)}"' if config.backend else "and it is missing"
        if config.platform in [backend.value for backend in Backend]:
            given += f': set backend and not platform to "{config.platform}"'
        elif config.platform:
            given += f'; models of the platform "{shown(config.platform)}" are not served'
        known = " or ".join(f'"{backend.value}"' for backend in Backend)
        raise ConfigurationError(f"backend must be {known}, {given}", file=file) from None


def _check_config(config_file: ConfigFile) -> None:
    """Check what the schema does not, for an LLM."""
    config, file = config_file.config, config_file.file
    if config.max_batch_size != 0:
        raise ConfigurationError(
            f"max_batch_size must be 0 or left out, not {config.max_batch_size}: it would add a batch dimension to "
            f"each request; how many sequences are computed together is the parameter maxBatchSize",
            file=file,
        )
    if config.HasField("model_transaction_policy") and not config.model_transaction_policy.decoupled:
        raise ConfigurationError(
            "model_transaction_policy must be decoupled or be left out: an LLM answers with many responses", file=file
        )
    for field, _ in config.ListFields():
        if field.name not in _EFFECTIVE_FIELDS:
            advice = _FIELD_ADVICE.get(field.name)
            raise ConfigurationError(
                f'{field.name} has no effect with backend "{Backend.TENGSERVE.value}": remove it'
                + (f" ({advice})" if advice else ""),
                file=file,
            )
    for key, value in config_file.config.parameters.items():
        if not value.string_value:
            raise ConfigurationError(
                f'parameter "{shown(key)}" has no string_value', file=file, line=config_file.lines.get(key)
            )


def _served_versions(folder: Path, config_file: ConfigFile) -> list[int]:
    """What the version policy chooses from the version folders, oldest first."""
    there = []
    for entry in _folders(folder, f'the folder of model "{folder.name}"'):
        if _VERSION.fullmatch(entry.name):
            there.append(int(entry.name))
        else:
            _log.debug("model %s: folder %s is no version and is ignored", folder.name, shown(entry.name))
    if not there:
        raise ConfigurationError(
            f'model "{folder.name}" has no version folder: make one that is named by a positive integer, such as 1'
        )
    return _choose(config_file.config.version_policy, sorted(there), config_file.file)


def _choose(policy: Any, there: list[int], file: str) -> list[int]:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return there
    if choice == "specific":
        wanted = sorted(set(policy.specific.versions))
        if not wanted:
            raise ConfigurationError("version_policy: specific names no version", file=file)
        for version in wanted:
            if version not in there:
                raise ConfigurationError(f"version_policy: version {version} has no folder", file=file)
        return wanted
    # Triton's default is the newest version alone; num_versions left out means 1.
    return there[-max(1, policy.latest.num_versions) :]
