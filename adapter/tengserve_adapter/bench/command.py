"""`tengserve bench`: loads running servers and tells how they did. Imports nothing of a server, and no torch."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tengserve_adapter.bench.dialects import GRPC, HTTP_DIALECTS
from tengserve_adapter.bench.figures import Slo
from tengserve_adapter.bench.gate import read_reference
from tengserve_adapter.bench.load import Arrivals
from tengserve_adapter.bench.measure import Measurement
from tengserve_adapter.bench.picture import draw
from tengserve_adapter.bench.plan import Plan, RateOf, Results
from tengserve_adapter.bench.progress import ProgressBar
from tengserve_adapter.bench.report import to_json, to_markdown
from tengserve_adapter.bench.summary import rows
from tengserve_adapter.bench.systems import Target, connect, targets, version
from tengserve_adapter.bench.workloads import WORKLOADS, Prompts, Workload
from tengserve_adapter.folders import make_folder
from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.weights import has_tokenizer

COMMAND: Final = "bench"
FILES: Final = ("results.json", "results.md", "results.svg")
_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""What of a CPU decides how fast it computes a model."""


def add_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="load a running server, and others in turn, and tell how they did",
        description="Measure servers of language models: the answers are compared with a reference first, then each is"
        " loaded in turn. Dialects: "
        + "; ".join(f"{one.name}: {one.what}" for one in HTTP_DIALECTS.values())
        + f"; {GRPC}: v2 ModelStreamInfer, ids, through tritonclient. Workloads: "
        + "; ".join(f"{one.name}: {one.what}" for one in WORKLOADS.values())
        + ".",
        allow_abbrev=False,
        formatter_class=formatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser, *, own_server: bool = False) -> None:
    """Add the flags.

    Args:
        parser: that takes them.
        own_server: a server, a tokenizer and a reference are there already unless others are named.
    """
    parser.add_argument(
        "--url",
        metavar="[DIALECT+]URL",
        required=not own_server,
        help="The server. Default dialect: infer_token.",
    )
    parser.add_argument("--name", default="tengserve", help="Its name in the tables. Default: tengserve.")
    parser.add_argument("--model", metavar="NAME", help="Its model. Default: the only one that it has.")
    parser.add_argument(
        "--against",
        metavar="NAME=[DIALECT+]URL",
        action="append",
        default=[],
        help="Another server, measured in turn with the first; may be given several times. Default dialect:"
        " completions.",
    )
    parser.add_argument(
        "--fields",
        metavar="NAME=JSON",
        action="append",
        default=[],
        help='Fields of every request to a server, such as other={"model": "org/name"}; null leaves one out.',
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        required=not own_server,
        help="Folder with the model's tokenizer (tokenizer.json), from which prompts of known length are made.",
    )
    parser.add_argument(
        "--reference",
        metavar="FILE",
        type=Path,
        help="Right greedy answers, as scripts/bench reference writes them. Unset: "
        + ("plain transformers gives them first." if own_server else "the first server's own, one at a time."),
    )
    parser.add_argument(
        "--agreement",
        type=float,
        help="Least share of the reference, before the first difference, with which a server is measured. Default: 1,"
        " all of it, or 0.3 where the reference was computed in numbers of 16 bits, whose rounding changes answers.",
    )
    parser.add_argument(
        "--workload",
        metavar="NAMES",
        default="chat",
        help=f"Names with commas between them: {', '.join(WORKLOADS)}. Default: chat.",
    )
    parser.add_argument(
        "--concurrency", metavar="COUNTS", default="1,4,8,16", help="Clients at once, in turn. Default: 1,4,8,16."
    )
    parser.add_argument(
        "--rate",
        metavar="RATES",
        default="",
        help="Requests a second, in turn, or with %% shares of the best of --concurrency, such as 50%%,80%%,120%%.",
    )
    parser.add_argument(
        "--arrivals",
        choices=[one.value for one in Arrivals],
        default=Arrivals.POISSON.value,
        help="How requests of --rate arrive. Default: poisson.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="How often each is measured. Default: 3.")
    parser.add_argument(
        "--requests",
        type=int,
        help="Requests of a run. Default: four a client, or 20 s of --rate, and at least 8.",
    )
    parser.add_argument(
        "--slo",
        metavar="LIMITS",
        default="ttft=1000,tpot=50",
        help="What a good answer keeps to, in milliseconds: ttft, tpot and e2e. Default: ttft=1000,tpot=50.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Of prompts and arrivals. Default: 0.")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="Of one request. Default: 600.")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help=f"Folder for {', '.join(FILES)}. Unset: the tables are printed only."
    )


def run(arguments: argparse.Namespace, program: str = "tengserve") -> int:
    """Measure and report; 0 when every answer was right, else 1.

    Args:
        arguments: of the command line.
        program: what was called, for the report.

    Raises:
        ConfigurationError: a flag is wrong, or a server cannot be asked.
    """
    found = targets(arguments.url, arguments.name, "infer_token", arguments.against, "completions", arguments.fields)
    _check_numbers(arguments)
    if arguments.out is not None:
        make_folder("--out", arguments.out)
    workloads = _workloads(arguments.workload)
    concurrency = [_count(text) for text in _parts(arguments.concurrency)]
    rates = [_rate(text, concurrency) for text in _parts(arguments.rate)]
    slo = _slo(arguments.slo)
    reference = None if arguments.reference is None else read_reference(arguments.reference)
    agreement = arguments.agreement
    if agreement is None:
        agreement = 1.0 if reference is None else reference.least_agreement
    prompts = _prompts(arguments.tokenizer)

    async def measure() -> tuple[Plan, Results, dict[str, Any]]:
        systems = [await connect(target, arguments.model if target is found[0] else None) for target in found]
        plan = Plan(
            systems=systems,
            workloads=workloads,
            concurrency=concurrency,
            rates=rates,
            arrivals=Arrivals(arguments.arrivals),
            rounds=arguments.rounds,
            requests=arguments.requests,
            slo=slo,
            seed=arguments.seed,
            timeout_s=arguments.timeout_s,
            agreement=agreement,
            reference=reference,
            prompts=prompts,
        )
        about = await _about(found, program)
        try:
            results = await Measurement(plan, ProgressBar(sys.stderr), time.perf_counter).run()
        finally:
            for system in systems:
                await system.close()
        about["machine"]["load_average_after"] = _load_average()
        return plan, results, about

    try:
        plan, results, about = asyncio.run(measure())
    except KeyboardInterrupt:
        return 130
    page = to_markdown(plan, results, about)
    print(page, end="", flush=True)  # noqa: T201 - the command's own output
    if arguments.out is not None:
        texts = (json.dumps(to_json(plan, results, about), indent=1) + "\n", page, draw(rows(results.runs)))
        try:
            for name, text in zip(FILES, texts, strict=True):
                (arguments.out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--out cannot be written to: {error.strerror or error}") from None
    passed = all(verdict.agreement >= plan.agreement for verdict in results.verdicts.values())
    return 0 if passed and all(one.figures.valid for one in results.runs) else 1


async def _about(found: Sequence[Target], program: str) -> dict[str, Any]:
    return {
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
        "machine": {
            "cpu": _cpu("model name") or platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "flags": [flag for flag in _FLAGS if flag in _cpu("flags").split()],
            "system": platform.platform(),
            "load_average_before": _load_average(),
        },
        "versions": {target.name: await version(target) for target in found},
    }


def _cpu(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def _load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _prompts(folder: Path) -> Prompts:
    if not folder.is_dir():
        raise ConfigurationError(f"--tokenizer must be a folder, got {shown(str(folder))!r}")
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ConfigurationError(f"--tokenizer cannot be read: {error.strerror or error}") from None
    if not has_tokenizer(names):
        raise ConfigurationError(
            f"--tokenizer must be a folder with tokenizer.json, and {shown(str(folder))!r} has no tokenizer files"
        )
    from tengserve_backend.devices.npu.guard import guard

    guard()
    # Imported here because it brings transformers, and mistakes are to be told before.
    from tengserve_backend.text.tokenizer import load_tokenizer

    return Prompts(load_tokenizer(folder).encode)


def _check_numbers(arguments: argparse.Namespace) -> None:
    for flag, value, least, most in (
        ("--rounds", arguments.rounds, 1, 100),
        ("--requests", 1 if arguments.requests is None else arguments.requests, 1, 10_000),
        ("--agreement", 1 if arguments.agreement is None else arguments.agreement, 0, 1),
        ("--timeout-s", arguments.timeout_s, 1, 86_400),
    ):
        if not least <= value <= most:
            raise ConfigurationError(f"{flag} must be from {least} to {most}, got {value}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _workloads(text: str) -> list[Workload]:
    names = _parts(text)
    if not names or not set(names) <= set(WORKLOADS):
        raise ConfigurationError(f"--workload must be of {', '.join(WORKLOADS)}, got {shown(text)!r}")
    return [WORKLOADS[name] for name in dict.fromkeys(names)]


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= 1024:
        raise ConfigurationError(f"--concurrency must be whole numbers from 1 to 1024, got {shown(text)!r}")
    return int(text)


def _rate(text: str, concurrency: Sequence[int]) -> float | RateOf:
    match = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,6})?)(%?)", text)
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"--rate must be requests a second or shares such as 80%, got {shown(text)!r}")
    if match[2] and not concurrency:
        raise ConfigurationError(f"--rate {text} is a share of the best of --concurrency, which has none")
    return RateOf(float(match[1]) / 100) if match[2] else float(match[1])


def _slo(text: str) -> Slo:
    limits = {}
    for part in _parts(text):
        match = re.fullmatch(r"(ttft|tpot|e2e)=([0-9]{1,7}(?:\.[0-9]{1,3})?)", part)
        if match is None:
            raise ConfigurationError(f"--slo must be of ttft=MS, tpot=MS and e2e=MS, got {shown(text)!r}")
        limits[match[1]] = float(match[2]) / 1e3
    return Slo(**limits)
