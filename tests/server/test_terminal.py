"""What the person at the terminal reads: progress, log lines, the page of flags."""

from __future__ import annotations

import io
import json
import logging
import shlex
import sys
from pathlib import Path

import pytest

from tengserve_adapter.listener import ListenError, listen, url_of
from tengserve_adapter.observability.logs import LineFormatter
from tengserve_adapter.progress import ProgressPrinter, tensor_commands
from tengserve_backend.inference import Datatype, TensorSpec


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ERASE = "\r\x1b[K"


def test_a_terminal_gets_one_rewritten_line_and_in_the_end_the_time() -> None:
    terminal = Terminal()
    progress = ProgressPrinter(terminal)
    for stage, fraction in (("reading", 0.0), ("reading", 0.5), ("reading", 0.501), ("checking", 1.0)):
        progress("tiny", stage, fraction)
    progress.loaded("tiny", 12.4)
    assert terminal.getvalue() == (
        f"{ERASE}loading tiny: reading{ERASE}loading tiny: reading 50 %{ERASE}loading tiny: checking"
        f"{ERASE}loaded tiny in 12 s\n"
    )


def test_a_log_record_on_a_terminal_stands_above_the_rewritten_line() -> None:
    terminal = Terminal()
    progress = ProgressPrinter(terminal)
    progress.write("before\n")
    progress("tiny", "reading", 0.5)
    progress.write("during\n")
    progress.failed()
    progress.write("after\n")
    line = "loading tiny: reading 50 %"
    assert terminal.getvalue() == f"before\n{ERASE}{line}{ERASE}during\n{line}{ERASE}after\n"


def test_a_file_gets_a_line_at_the_start_and_the_end_of_a_stage() -> None:
    log = io.StringIO()
    progress = ProgressPrinter(log)
    for percent in range(0, 101, 10):
        progress("tiny", "reading", percent / 100)
    progress("tiny", "starting", 1.0)
    progress.write("a record\n")
    progress.loaded("tiny", 0.2)
    assert log.getvalue().splitlines() == [
        "loading tiny: reading",
        "loading tiny: reading 100 %",
        "loading tiny: starting",
        "a record",
        "loaded tiny in under 1 s",
    ]


def test_a_closed_stderr_does_not_stop_the_load() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    ProgressPrinter(Closed())("tiny", "reading", 0.5)


def test_the_line_for_a_model_of_tensors_has_its_inputs() -> None:
    inputs = (
        TensorSpec("A", Datatype.INT32, (-1, 2)),
        TensorSpec("B", Datatype.BOOL, (1,)),
        TensorSpec("C", Datatype.FP32, (-1,), optional=True),
    )
    (line,) = tensor_commands("http://h:1", "m", inputs)
    _, _, url, _, _, _, body = shlex.split(line)
    assert url == "http://h:1/v2/models/m/infer"
    assert json.loads(body)["inputs"] == [
        {"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [1, 1]},
        {"name": "B", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]


@pytest.mark.parametrize(
    "inputs",
    [
        (TensorSpec("IMAGE", Datatype.UINT8, (3, 224, 224)),),
        (TensorSpec("HALF", Datatype.FP16, (1,)),),
        (TensorSpec("MAY", Datatype.FP32, (1,), optional=True),),
    ],
)
def test_a_model_whose_inputs_are_no_line_shows_what_it_takes(inputs: tuple[TensorSpec, ...]) -> None:
    assert tensor_commands("http://h:1", "m", inputs) == ["curl -s http://h:1/v2/models/m"]


def test_control_characters_of_a_message_are_escaped() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "a\nb\x1b[31m\u2028%s", ("c\rd",), None)
    assert LineFormatter().format(record).endswith(r" INFO x: a\nb\x1b[31m\u2028c\rd")


def test_a_traceback_follows_its_record_marked() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    first, *others = LineFormatter().format(record).splitlines()
    assert first.endswith(" ERROR x: failed")
    assert all(line.startswith("  | ") for line in others)
    assert others[-2:] == ["  | ValueError: two", "  | lines"]


def test_control_characters_of_an_exception_are_escaped() -> None:
    try:
        raise ValueError("a\x1b[31m\ud800\rb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    assert LineFormatter().format(record).endswith("\n  | ValueError: a\\x1b[31m\\ud800\n  | b")


def test_a_text_of_any_length_makes_a_record_of_bounded_length() -> None:
    try:
        raise ValueError("\n" * 1_000_000 + "x" * 1_000_000)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it says %s", (error,), sys.exc_info())
    formatted = LineFormatter().format(record)
    assert len(formatted) < 250_000
    assert " ERROR x: it says" in formatted
    assert "characters are left out" in formatted
    assert "Traceback" in formatted
    assert formatted.endswith("xxx")


@pytest.mark.parametrize(
    ("host", "pattern"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")],
)
def test_the_url_is_one_that_a_local_client_reaches(host: str, pattern: str) -> None:
    try:
        listener = listen(host, 0, "HTTP")
    except ListenError:
        assert host == "::1", "only IPv6 may be missing"
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener).startswith(pattern)


def test_the_page_of_flags_is_rendered_from_the_settings() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        import _docs_cli
    finally:
        del sys.path[0]
    page = _docs_cli.render()["docs/cli.md"]
    assert "| `--http-port PORT` | from 0 to 65535 | `8080` |" in page
    assert "| `--exit-on-error`, `--no-exit-on-error` |" in page
