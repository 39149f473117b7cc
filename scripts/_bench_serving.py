"""`tengserve bench` with everything that the quick-start model needs: its server, its tokenizer, right answers.

A server of our own is started unless --url names one.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from _bench import own_server
from _bench_weights import REPOSITORY, weights_folder

from tengserve_adapter.bench.command import add_arguments, run
from tengserve_adapter.bench.dialects import GRPC
from tengserve_adapter.bench.systems import DIALECTS
from tengserve_backend.errors import ConfigurationError


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench serving", description=__doc__)
    add_arguments(parser, own_server=True)
    parser.add_argument(
        "--model-repository", type=Path, default=REPOSITORY, help="its only LLM is served (default: the quick start's)"
    )
    parser.add_argument("--dialect", choices=DIALECTS, default="infer_token", help="of our own server")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the reference (default: the one in which this machine serves the model; with --url float32)",
    )
    parser.add_argument(
        "--serve-flag",
        action="append",
        default=[],
        help="a flag of our own server, such as --serve-flag=--log-level=debug",
    )
    options = parser.parse_args()
    # By default SIGTERM ends Python at once, and the server would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    of_model = []
    if options.model_repository != REPOSITORY:
        of_model += ["--model-repository", str(options.model_repository)]
    if options.tokenizer is not None:
        of_model += ["--weights", str(options.tokenizer)]
    options.tokenizer = options.tokenizer or weights_folder(options.model_repository)
    with contextlib.ExitStack() as stack:
        if options.reference is None:
            options.reference = Path(stack.enter_context(tempfile.TemporaryDirectory()), "reference.json")
            # What a server that others started computes in is not known here.
            flags = ["--dtype", options.dtype or ("served" if options.url is None else "float32"), *of_model]
            print(
                "plain transformers gives the right answers first, which may take a minute or two.\n"
                f"scripts/bench reference FILE {shlex.join(flags)} keeps them, for --reference FILE",
                file=sys.stderr,
            )
            maker = Path(__file__).with_name("_bench_reference.py")
            # In a process of its own: torch's threads and memory must be gone when the measurement begins. Where it
            # writes is of no use to anybody.
            command = [sys.executable, str(maker), str(options.reference), *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if options.url is None:
            server = own_server(options.model_repository, *options.serve_flag, grpc=options.dialect == GRPC)
            address = stack.enter_context(server).removeprefix("http://")
            options.url = f"{options.dialect}+http://{address}"
        try:
            return run(options, parser.prog)
        except ConfigurationError as error:
            parser.error(error.message)


if __name__ == "__main__":
    sys.exit(main())
