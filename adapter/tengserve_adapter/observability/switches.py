"""Settings that a client may read and change while the server runs: what is logged, and what is traced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from tengserve_adapter.control import SettingValue
from tengserve_backend.errors import InvalidRequestError, UnsupportedError, shown

_PACKAGES: Final = ("tengserve_adapter", "tengserve_backend")
_FORMATS: Final = ("default", "ISO8601")
_MAX_VERBOSE: Final = 2**31 - 1

_TRACE_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
    "trace_file": ("",),
    "trace_mode": ("triton",),
}
_TRACE_MINIMUM: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MAX_TRACE: Final = 2**32 - 1


class LogSettings:
    """Triton's log settings over Python's logging. Everything belongs to one thread, that of the event loop.

    Errors, warnings and information are switched on and off each by itself; a verbose level from 1 on lets through what
    --log-level debug does.
    """

    def __init__(self) -> None:
        """Starts from what --log-level has made of the packages' loggers."""
        level = logging.getLogger(_PACKAGES[0]).getEffectiveLevel()
        self._settings: dict[str, SettingValue] = {
            "log_file": "",
            "log_info": level <= logging.INFO,
            "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR,
            "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": "default",
        }

    def update(self, changes: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
        """Apply all changes or, when one is wrong, none; the settings then.

        Raises:
            InvalidRequestError: no such setting, or a value that breaks its rule.
            UnsupportedError: where to log is the operator's choice alone.
        """
        for name, value in changes.items():
            self._check(name, value)
        if changes:
            self._settings |= changes
            self._apply()
        return dict(self._settings)

    def passes(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged; a filter of logging."""
        if record.levelno >= logging.ERROR:
            return bool(self._settings["log_error"])
        if record.levelno >= logging.WARNING:
            return bool(self._settings["log_warning"])
        if record.levelno >= logging.INFO:
            return bool(self._settings["log_info"])
        return bool(self._settings["log_verbose_level"])

    def _check(self, name: str, value: SettingValue) -> None:
        if name not in self._settings:
            raise InvalidRequestError(
                f"unknown log setting '{shown(name)}'; known are {', '.join(self._settings)}", field=shown(name)
            )
        if name == "log_file":
            raise UnsupportedError("log file location can not be updated through network protocol", field=name)
        rule = "true or false"
        wrong = not isinstance(value, bool)
        if name == "log_verbose_level":
            rule = f"a whole number in [0, {_MAX_VERBOSE}]"
            wrong = isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_VERBOSE
        elif name == "log_format":
            rule, wrong = f"one of {', '.join(_FORMATS)}", value not in _FORMATS
        if wrong:
            raise InvalidRequestError(f"log setting '{name}' must be {rule}, got {shown(value)}", field=name)

    def _apply(self) -> None:
        level = logging.CRITICAL
        for name, its_level in (
            ("log_error", logging.ERROR),
            ("log_warning", logging.WARNING),
            ("log_info", logging.INFO),
            ("log_verbose_level", logging.DEBUG),
        ):
            if self._settings[name]:
                level = its_level
        for package in _PACKAGES:
            logging.getLogger(package).setLevel(level)
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self.passes)
            handler.addFilter(self.passes)


class TraceSettings:
    """Triton's trace settings of the server and of models. Nothing is traced here, so the level stays OFF.

    A model has the server's settings but for those that were set for it. One thread, that of the event loop.
    """

    def __init__(self) -> None:
        self._server: dict[str, tuple[str, ...]] = {}
        self._models: dict[str, dict[str, tuple[str, ...]]] = {}

    def update(self, model: str, changes: Mapping[str, Sequence[str] | None]) -> Mapping[str, Sequence[str]]:
        """Apply all changes or, when one is wrong, none; the settings then.

        Args:
            model: one that there is; "" for the server's.
            changes: by name; None brings back what would hold without the setting.

        Raises:
            InvalidRequestError: no such setting, or a value that breaks its rule.
            UnsupportedError: what only a server that traces could do.
        """
        for name, values in changes.items():
            _check_trace(name, values)
        own = dict(self._models.get(model, {}) if model else self._server)
        for name, values in changes.items():
            own.pop(name, None)
            if values is not None:
                own[name] = tuple(values)
        if not model:
            self._server = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)
        return {**_TRACE_DEFAULTS, **self._server, **(own if model else {})}


def _check_trace(name: str, values: Sequence[str] | None) -> None:
    if name not in _TRACE_DEFAULTS:
        raise InvalidRequestError(
            f"unknown trace setting '{shown(name)}'; known are {', '.join(_TRACE_DEFAULTS)}", field=shown(name)
        )
    if values is None:
        return
    if name == "trace_file":
        raise UnsupportedError("trace file location can not be updated through network protocol", field=name)
    if name in ("trace_level", "trace_mode"):
        if tuple(values) != _TRACE_DEFAULTS[name]:
            only = _TRACE_DEFAULTS[name][0]
            raise UnsupportedError(f"this server writes no traces: '{name}' can only be {only}", field=name)
        return
    minimum = _TRACE_MINIMUM[name]
    text = values[0] if len(values) == 1 else ""
    digits = text.removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 10 else minimum - 1
    if not minimum <= number <= _MAX_TRACE:
        raise InvalidRequestError(
            f"trace setting '{name}' must be a whole number in [{minimum}, {_MAX_TRACE}],"
            f" got {shown(text or ','.join(values))}",
            field=name,
        )
