"""The command line: `tengserve serve`, `tengserve bench`, `tengserve npu-selfcheck` and `tengserve --version`.

Importing this module brings no torch, no transformers and no kserve: a mistake on the command line or in the model
repository is told at once. Every mistake is one line on stderr and status 2; what fails at run time is status 1.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from importlib import metadata
from typing import Any, NoReturn

from tengserve_adapter import npu_selfcheck
from tengserve_adapter import settings as options
from tengserve_adapter.bench import command as bench
from tengserve_adapter.folders import make_folder
from tengserve_adapter.settings import ServerSettings
from tengserve_backend.errors import ConfigurationError, one_line, shown
from tengserve_backend.garbage import importing
from tengserve_backend.process import prepare

PROGRAM = "tengserve"
_STDERR = 2
USAGE_ERROR = 2
RUN_ERROR = 1
_OTHERS = {bench.COMMAND: bench.run, npu_selfcheck.COMMAND: npu_selfcheck.run}
"""Every command but serve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit status."""
    _open_standard_streams()
    parser, serve_parser = build_parsers()
    arguments, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if arguments.command is None:
        parser.error(f"a command is missing: serve, {' or '.join(_OTHERS)}")
    if arguments.command in _OTHERS:
        return _other(parser, arguments, unknown)
    if unknown:
        serve_parser.error(_unknown(unknown[0]))
    missing = [options.flag(name) for name in _required() if getattr(arguments, name) is None]
    if missing:
        serve_parser.error(f"missing: {', '.join(missing)}")
    try:
        return _serve(_settings(arguments))
    except ConfigurationError as error:
        return _fail(error.message, USAGE_ERROR)


def _other(parser: argparse.ArgumentParser, arguments: argparse.Namespace, unknown: Sequence[str]) -> int:
    if unknown:
        parser.error(f"unknown argument {shown(unknown[0])!r}")
    try:
        return _OTHERS[arguments.command](arguments)
    except ConfigurationError as error:
        return _fail(error.message, USAGE_ERROR)


def build_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the program and that of `serve`, whose flags are the fields of ServerSettings."""
    parser = _Parser(prog=PROGRAM, description="LLM inference server on KServe.", allow_abbrev=False)
    version = f"{PROGRAM} {metadata.version(PROGRAM)}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="command")
    serve = commands.add_parser(
        "serve", help="serve the models of a model repository", allow_abbrev=False, formatter_class=_HelpFormatter
    )
    for field in fields(ServerSettings):
        option = options.option(field.name)
        extra: dict[str, Any] = {"dest": field.name, "default": None}
        if option.repeats:
            extra |= {"action": "append", "metavar": option.metavar}
        elif options.value_type(field.name) is bool:
            extra["action"] = argparse.BooleanOptionalAction
        else:
            extra["metavar"] = option.metavar
        serve.add_argument(options.flag(field.name), help=_help(field.name), **extra)
    bench.add_command(commands, _HelpFormatter)
    npu_selfcheck.add_command(commands, _HelpFormatter)
    return parser, serve


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_fail(f"{message} (see {self.prog} --help)", USAGE_ERROR))


def _open_standard_streams() -> None:
    """Open on nothing whichever of stdin, stdout and stderr was closed.

    Else the listening socket would get the number of stderr, and whatever a library complains of there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(number)
    # Python has None for a stream that was closed, and print() then writes to the other one.
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open to the process's end


def _required() -> list[str]:
    # Checked here and not by argparse, which would tell of them before it tells of a mistyped flag.
    return [field.name for field in fields(ServerSettings) if field.default is MISSING]


def _help(name: str) -> str:
    default = options.default_text(name)
    text = options.option(name).help.replace("%", "%%")
    return f"{text} Default: {default}." if default else text


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    given = {}
    for field in fields(ServerSettings):
        value = getattr(arguments, field.name)
        if value is not None:
            if isinstance(value, list):
                value = tuple(value)
            given[field.name] = options.parse(field.name, value) if isinstance(value, str) else value
    return ServerSettings(**given)


def _serve(settings: ServerSettings) -> int:
    prepare()
    from tengserve_adapter.children import keep_signals_to_this_process
    from tengserve_adapter.lifecycle import end_early_on_signals, end_in_time

    keep_signals_to_this_process()
    end_early_on_signals()
    # Imported step by step, the quick ones first, so that each mistake is told as soon as it can be known.
    from tengserve_backend.repository.live import first_sources
    from tengserve_backend.repository.modes import ControlMode

    mode = ControlMode(settings.model_control_mode)
    sources = first_sources(settings.model_repository, mode, settings.load_model)
    names = sorted({source.name for source in sources})
    # What is loaded by request may be the default model later on.
    known = mode is ControlMode.EXPLICIT or settings.default_model is None or settings.default_model in names
    if not known:
        raise ConfigurationError(
            f"--default-model must be a model of the repository ({shown(', '.join(names))}),"
            f" got {shown(settings.default_model)!r}"
        )

    if settings.step_profile is not None:
        make_folder("--step-profile", settings.step_profile)

    from tengserve_adapter.listener import ListenError, check_free, listen
    from tengserve_adapter.observability.logs import configure_logging
    from tengserve_adapter.progress import ProgressPrinter

    try:
        listener = listen(settings.host, settings.http_port, "HTTP, see --http-port")
        if settings.grpc:
            check_free(settings.host, settings.grpc_port, "gRPC, see --grpc-port and --no-grpc")
        progress = ProgressPrinter(sys.stderr)
        configure_logging(settings.log_level, progress)
        _check_device(settings.device)

        with importing("tengserve_adapter.server"):
            from tengserve_adapter.server import serve

        status = serve(settings, sources, listener, progress)
        end_in_time(status)
        return status
    except ListenError as error:
        return _fail(error.message, RUN_ERROR)


def _check_device(device: str) -> None:
    """Guard the process before anything imports torch, a user's own model among it; see the guard.

    Raises:
        ConfigurationError: the models are to run on an NPU, and there is none that can be used.
    """
    from tengserve_backend.devices.npu.guard import guard

    on_npu = device.startswith("npu")
    readiness = guard(log_unusable=not on_npu)
    if on_npu and not readiness.usable:
        raise ConfigurationError(f"--device is {shown(device)!r}, but {readiness.reason}")


def _unknown(argument: str) -> str:
    known = [options.flag(field.name) for field in fields(ServerSettings)]
    near = difflib.get_close_matches(argument.partition("=")[0], known, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown argument {shown(argument)!r}{hint}"


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {one_line(message)}", file=sys.stderr, flush=True)  # noqa: T201 - the command's own output
    return status
