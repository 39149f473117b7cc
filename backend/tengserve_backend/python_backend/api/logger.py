"""The log, as a user's model writes to it."""

from __future__ import annotations

import enum
import logging
from typing import Any

MAX_MESSAGE_CHARS = 16_384
"""Of one line."""

_LOG = logging.getLogger("tengserve_backend.python_backend.model")


class LogLevel(enum.Enum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


def make_logger(model: str) -> type:
    """The class Logger for one model; its lines begin with the model's name."""

    class Logger:
        """Writes to the server's log."""

        # Triton's names lie beside the class too: Logger.INFO.
        LogLevel = LogLevel
        INFO, WARNING, ERROR, VERBOSE = LogLevel.INFO, LogLevel.WARNING, LogLevel.ERROR, LogLevel.VERBOSE

        @staticmethod
        def log(message: str, level: Any = LogLevel.INFO) -> None:
            """Write a line.

            Raises:
                TypeError: the message is no text, or the level none of LogLevel.
            """
            if not isinstance(message, str) or not isinstance(level, LogLevel):
                raise TypeError(
                    f"log takes a message of type str and a LogLevel, not {type(message).__name__} and "
                    f"{type(level).__name__}"
                )
            _LOG.log(_LEVELS[level], "model %s: %s", model, message[:MAX_MESSAGE_CHARS])

        @staticmethod
        def log_info(message: str) -> None:
            """Write a line for the operator."""
            Logger.log(message, LogLevel.INFO)

        @staticmethod
        def log_warn(message: str) -> None:
            """Write a warning."""
            Logger.log(message, LogLevel.WARNING)

        @staticmethod
        def log_error(message: str) -> None:
            """Write an error."""
            Logger.log(message, LogLevel.ERROR)

        @staticmethod
        def log_verbose(message: str) -> None:
            """Write a line for whoever debugs."""
            Logger.log(message, LogLevel.VERBOSE)

    return Logger
