"""What HTTP and gRPC do to a model repository and to the server's own switches: the same operations, two dialects.

Configuration, statistics and settings are in the JSON form of the v2 protocol: names in snake_case, whole numbers as
numbers. It is what HTTP answers as it is, and what gRPC fills its messages from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SettingValue = bool | int | str
JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One model version of the repository index.

    Attributes:
        name: the model's.
        version: "" for a model that was never loaded.
        state: "READY", "LOADING", "UNLOADING", "UNAVAILABLE", or "" for a model that was never loaded.
        reason: why it is unavailable, safe to show; "" when there is nothing to tell.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class ModelControl(Protocol):
    """The model repository, as a client may look into it and change it.

    Every method raises the errors of tengserve_backend.errors; a cancelled load or unload goes on without its caller.
    """

    async def index(self, *, ready_only: bool) -> Sequence[IndexRow]:
        """Every model of the repository as it is on the disk now, or only the versions that are ready."""
        ...

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model, or load it anew; returns when it is ready.

        Args:
            name: of the model.
            config_json: a configuration that replaces the one on the disk, as JSON text.
            files: path in the model's folder, as in "1/model.py", to content; they replace the version folders.
        """
        ...

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Take nothing new for a model; what runs ends in the background."""
        ...

    def config(self, name: str, version: str) -> JsonObject:
        """A ready model's ModelConfig; version "" is the newest that is ready."""
        ...

    def statistics(self, name: str, version: str) -> Sequence[JsonObject]:
        """The ModelStatistics of the ready versions; name "" means every model, version "" every version."""
        ...

    def trace_settings(self, model: str, changes: Mapping[str, Sequence[str] | None]) -> Mapping[str, Sequence[str]]:
        """Apply changes, if there are any, and tell the trace settings.

        Args:
            model: "" for those of the server.
            changes: by name; None clears a setting.
        """
        ...

    def log_settings(self, changes: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
        """Apply changes, if there are any, and tell the log settings."""
        ...
