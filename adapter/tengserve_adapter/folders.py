"""Folders that a flag names, for what is written while the program runs or at its end."""

from __future__ import annotations

from pathlib import Path

from tengserve_backend.errors import ConfigurationError


def make_folder(flag: str, folder: Path) -> None:
    """Make the folder that a flag names, and those above it, where they are not there yet.

    Raises:
        ConfigurationError: that is not possible; the message names the flag and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{flag} cannot be made a folder: {error.strerror or error}") from None
