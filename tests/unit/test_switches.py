"""What a client may change of logging and tracing while the server runs."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from tengserve_adapter.observability.logs import LineFormatter
from tengserve_adapter.observability.switches import LogSettings, TraceSettings
from tengserve_backend.errors import InvalidRequestError, UnsupportedError

LOGGER = logging.getLogger("tengserve_adapter.example")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged, beginning with what --log-level info makes of it; everything is put back."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    packages = [logging.getLogger(f"tengserve_{part}") for part in ("adapter", "backend")]
    levels = [package.level for package in packages]
    logging.getLogger().addHandler(handler)
    for package in packages:
        package.setLevel(logging.INFO)
    yield stream
    logging.getLogger().removeHandler(handler)
    for other in logging.getLogger().handlers:
        other.filters.clear()  # pytest's own, which has none
    for package, level in zip(packages, levels, strict=True):
        package.setLevel(level)


def said(stream: io.StringIO) -> list[str]:
    stream.truncate(0)
    stream.seek(0)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        LOGGER.log(level, logging.getLevelName(level).lower())
    return [line.split()[1] for line in stream.getvalue().splitlines()]


def test_every_kind_of_message_is_switched_by_itself(logged):
    settings = LogSettings()
    assert settings.update({}) == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert said(logged) == ["INFO", "WARNING", "ERROR"]
    settings.update({"log_verbose_level": 1})
    assert said(logged) == ["DEBUG", "INFO", "WARNING", "ERROR"]
    settings.update({"log_warning": False, "log_verbose_level": 0})
    assert said(logged) == ["INFO", "ERROR"]
    settings.update({"log_info": False, "log_error": False})
    assert said(logged) == []
    changed = settings.update({"log_error": True, "log_format": "ISO8601"})
    assert said(logged) == ["ERROR"]
    assert (changed["log_error"], changed["log_format"]) == (True, "ISO8601")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"log_info": 1}, "log setting 'log_info' must be true or false, got 1"),
        ({"log_error": "yes"}, "'log_error' must be true or false"),
        ({"log_verbose_level": True}, r"'log_verbose_level' must be a whole number in \[0, 2147483647\], got True"),
        ({"log_verbose_level": -1}, "got -1"),
        ({"log_format": "XML"}, "'log_format' must be one of default, ISO8601, got XML"),
        ({"log_level": 1}, "unknown log setting 'log_level'; known are log_file"),
    ],
)
def test_wrong_log_settings_change_nothing(logged, changes, error):
    settings = LogSettings()
    with pytest.raises(InvalidRequestError, match=error):
        settings.update({"log_warning": False, **changes})
    assert settings.update({})["log_warning"] is True
    with pytest.raises(UnsupportedError, match="log file location can not be updated through network protocol"):
        settings.update({"log_file": "x.log"})


def test_trace_settings_of_the_server_and_of_a_model():
    settings = TraceSettings()
    assert settings.update("", {})["trace_level"] == ("OFF",)
    assert settings.update("", {"trace_rate": ["5"], "trace_level": ["OFF"]})["trace_rate"] == ("5",)
    assert settings.update("m", {"trace_rate": ["7"]})["trace_rate"] == ("7",)
    assert settings.update("m", {"trace_count": ["-1"]})["trace_rate"] == ("7",)
    assert settings.update("", {})["trace_rate"] == ("5",)
    assert settings.update("m", {"trace_rate": None})["trace_rate"] == ("5",)
    assert settings.update("", {"trace_rate": None})["trace_rate"] == ("1000",)


@pytest.mark.parametrize(
    ("changes", "kind", "error"),
    [
        ({"trace_level": ["TIMESTAMPS"]}, UnsupportedError, "writes no traces: 'trace_level' can only be OFF"),
        ({"trace_mode": ["opentelemetry"]}, UnsupportedError, "'trace_mode' can only be triton"),
        ({"trace_file": ["x"]}, UnsupportedError, "trace file location can not be updated"),
        (
            {"trace_rate": ["x"]},
            InvalidRequestError,
            r"'trace_rate' must be a whole number in \[0, 4294967295\], got x",
        ),
        ({"trace_rate": ["1", "2"]}, InvalidRequestError, "got 1,2"),
        ({"trace_count": ["-2"]}, InvalidRequestError, "got -2"),
        ({"trace_colour": ["red"]}, InvalidRequestError, "unknown trace setting 'trace_colour'"),
    ],
)
def test_wrong_trace_settings_change_nothing(changes, kind, error):
    settings = TraceSettings()
    with pytest.raises(kind, match=error):
        settings.update("m", {"log_frequency": ["9"], **changes})
    assert settings.update("m", {})["log_frequency"] == ("0",)
