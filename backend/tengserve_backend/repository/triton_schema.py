"""Triton's protobuf schemas, as data: what config.pbtxt is written in, and what gRPC clients speak.

They are tritonclient's, taken out of its generated files without importing them, for pools of our own: importing
`tritonclient.grpc` would register messages of the package `inference` in the process's default pool, where kserve
registers others under the same names (docs/decisions/0002-private-descriptor-pool.md).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2

from tengserve_backend.errors import ConfigurationError

MODEL_CONFIG = "model_config"
"""The schema of config.pbtxt."""
GRPC_SERVICE = "grpc_service"
"""The schema of inference.GRPCInferenceService; it imports that of config.pbtxt."""

_MODULES = {MODEL_CONFIG: "model_config_pb2.py", GRPC_SERVICE: "service_pb2.py"}


def triton_schema(name: str) -> descriptor_pb2.FileDescriptorProto:
    """One of the two schemas.

    Raises:
        ConfigurationError: the installed tritonclient is missing or laid out in another way.
    """
    spec = importlib.util.find_spec("tritonclient")  # Finds a top-level package without importing it.
    for folder in (spec and spec.submodule_search_locations) or ():
        generated = Path(folder, "grpc", _MODULES[name])
        if generated.is_file():
            for literal in _descriptor_literals(ast.parse(generated.read_bytes())):
                return descriptor_pb2.FileDescriptorProto.FromString(literal)
    raise ConfigurationError(f"Triton's schema {name} was not found: install tritonclient as the project pins it")


def _descriptor_literals(module: ast.Module) -> Iterator[bytes]:
    """The arguments of the calls that hand a serialized file to a descriptor pool."""
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "AddSerializedFile"
        ):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, bytes):
                    yield argument.value
