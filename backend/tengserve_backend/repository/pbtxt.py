"""Read a config.pbtxt: protobuf text format with Triton's own ModelConfig schema, in pools of our own."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.settings import near_misses
from tengserve_backend.repository.triton_schema import MODEL_CONFIG, triton_schema

MAX_CONFIG_BYTES = 1024 * 1024
"""A larger config.pbtxt is refused: it is something else."""

_MAX_MESSAGE_CHARS = 300

_MODEL_CONFIG = "inference.ModelConfig"
_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w+)')
_POSITION = re.compile(r"^\d+:\d+ : ")
_KEY = re.compile(r"""^[^#\n]*?\bkey\s*:?\s*(["'])(.*?)\1""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config.pbtxt that follows the schema.

    Attributes:
        file: its name relative to the repository, for errors.
        config: the inference.ModelConfig message.
        parameters: its `parameters`; every value is a string.
        lines: the line on which each parameter's key stands, as far as it is known; the first is 1.
    """

    file: str
    config: Any
    parameters: Mapping[str, str]
    lines: Mapping[str, int]


def read_config(path: Path, file: str) -> ConfigFile:
    """Read one config.pbtxt.

    Args:
        path: where it is.
        file: its name in errors, relative to the repository.

    Raises:
        ConfigurationError: it cannot be read, is no text format, or has a field or value that the schema has not; with
            line and column.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigurationError(f"the file is larger than {MAX_CONFIG_BYTES} bytes", file=file)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file cannot be read ({error.strerror})", file=file) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError("the file is not UTF-8 text", file=file, line=line) from error
    return parse_config(text, file)


def parse_config(text: str, file: str) -> ConfigFile:
    """The same for text that has been read; raises as `read_config` does."""
    schema, entries_schema = _schemas()
    config = _parse(schema, text, file)
    lines: dict[str, int] = {}
    for match in _KEY.finditer(text):
        lines.setdefault(match[2], text.count("\n", 0, match.start(2)) + 1)
    seen: set[str] = set()
    # A protobuf map takes the last of two entries with one key and says nothing; an operator would never find out.
    for entry in _parse(entries_schema, text, file).parameters:
        if entry.key in seen:
            raise ConfigurationError(
                f'parameter "{shown(entry.key)}" is set twice', file=file, line=lines.get(entry.key)
            )
        seen.add(entry.key)
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return ConfigFile(file, config, parameters, lines)


def new_config() -> Any:
    """An empty inference.ModelConfig message."""
    return _schemas()[0].model_config()


def _parse(schema: _Schema, text: str, file: str) -> Any:
    try:
        return text_format.Parse(text, schema.model_config())
    except text_format.ParseError as error:
        message = _POSITION.sub("", str(error)).strip().rstrip(".")
        if unknown := _UNKNOWN_FIELD.search(message):
            fields = schema.pool.FindMessageTypeByName(unknown[1]).fields_by_name
            where = "" if unknown[1] == _MODEL_CONFIG else f" in {unknown[1].rpartition('.')[2]}"
            message = f'unknown field "{shown(unknown[2])}"{where}{near_misses(unknown[2], list(fields))}'
        elif unknown := _UNKNOWN_VALUE.search(message):
            values = schema.pool.FindEnumTypeByName(unknown[1]).values_by_name
            message = f'unknown value "{shown(unknown[2])}"{near_misses(unknown[2], list(values))}'
        else:
            # protobuf may repeat the whole line, which may be the whole file.
            message = shown(message, _MAX_MESSAGE_CHARS)
        raise ConfigurationError(message, file=file, line=error.GetLine(), column=error.GetColumn()) from None


@dataclass(frozen=True, slots=True)
class _Schema:
    """ModelConfig in a pool of its own."""

    pool: descriptor_pool.DescriptorPool

    @classmethod
    def of(cls, file: descriptor_pb2.FileDescriptorProto) -> _Schema:
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        return cls(pool)

    def model_config(self) -> Any:
        """An empty message."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(_MODEL_CONFIG))()


@functools.cache
def _schemas() -> tuple[_Schema, _Schema]:
    """Triton's schema, and the same with `parameters` as a list of entries, in which a repeated key can be seen."""
    file = triton_schema(MODEL_CONFIG)
    schema = _Schema.of(file)
    for message in file.message_type:
        for nested in message.nested_type:
            if message.name == "ModelConfig" and nested.name == "ParametersEntry":
                nested.options.ClearField("map_entry")
    return schema, _Schema.of(file)
