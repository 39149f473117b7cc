"""Logging: every record of this process, ours or a library's, is one line on stderr; a traceback follows, indented."""

from __future__ import annotations

import logging
import traceback
from typing import Protocol

from tengserve_backend.errors import one_line

_NOISY = (
    # Request timings and start-up lines at INFO.
    "kserve",
    "kserve.trace",
    "uvicorn",
    "uvicorn.error",
    "asyncio",
    "httpx",
    "httpcore",
    "filelock",
    "urllib3",
    "transformers",
    "accelerate",
    "py.warnings",
)


_MAX_CHARS = 32768
"""Of a record's line, and of its traceback. What an exception says may be what a client sent, of any length."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123 WARNING tengserve_adapter.server: text`, control characters in the text escaped.

    Escaping keeps a client from writing log lines, or to the operator's terminal, on its own. Of a text that is too
    long the middle is left out.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The record's line."""
        return one_line(_bounded(super().formatMessage(record)))

    def formatException(self, ei: object) -> str:  # noqa: N802 - the name is logging's
        """The traceback, each line marked as belonging to the record above."""
        if not isinstance(ei, tuple) or ei[1] is None:
            return ""
        lines = _bounded("".join(traceback.format_exception(ei[1]))).splitlines()
        return "\n".join(f"  | {one_line(line)}" for line in lines)


def _bounded(text: str) -> str:
    beyond = len(text) - _MAX_CHARS
    if beyond <= 0:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}... {beyond} characters are left out ...{text[-half:]}"


class _WithoutClientMistakes(logging.Filter):
    """Drop what kserve's exception handlers log: a traceback at ERROR for every 4xx and for every readiness poll.

    The one handler that concerns us, for exceptions that nobody expected, is replaced by ours (`server.py`).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.module == "errors" and record.getMessage() == "Exception:")


class LogStream(Protocol):
    """What log lines are written to."""

    def write(self, text: str) -> object:
        """Write whole lines."""
        ...

    def flush(self) -> object:
        """Bring them out."""
        ...


def configure_logging(level: str, stream: LogStream) -> None:
    """Send every logger to a stream at this level; libraries speak from WARNING on, or from INFO when debugging.

    Call it before kserve is imported: kserve leaves logging alone when it finds it configured.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    chosen = logging.getLevelNamesMapping()[level.upper()]
    # The root's level is that of libraries that nobody has listed.
    root.setLevel(max(chosen, logging.INFO))
    for package in ("tengserve_adapter", "tengserve_backend"):
        logging.getLogger(package).setLevel(chosen)
    quiet = logging.INFO if chosen == logging.DEBUG else max(chosen, logging.WARNING)
    for name in _NOISY:
        logging.getLogger(name).setLevel(quiet)
    if chosen > logging.DEBUG:
        logging.getLogger("py.warnings").setLevel(logging.ERROR)
    logging.getLogger("kserve").addFilter(_WithoutClientMistakes())
