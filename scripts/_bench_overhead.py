"""What v2 infer costs beside stock KServe: the same identity model on both servers, paired in one run.

Three processes: `tengserve serve` with a python model, a stock kserve.ModelServer with a kserve.Model, and one client
that loads first the one and then the other, in turns. Both models get an array and give it back; both servers have one
worker, the event loop that they choose themselves, and write no line a request. Every answer is compared with what was
sent before anything is counted, and every counted answer with that one. Latencies are those that the client sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from _bench import started
from _bench_overhead_figures import Case, Sample, heading, row, summary

_FOLDER = Path(__file__).parent
_ROUTES = ("json", "binary", "grpc")
_CONFIG = """
backend: "python"
input [{ name: "INPUT" data_type: TYPE_FP32 dims: [1, -1] }]
output [{ name: "OUTPUT" data_type: TYPE_FP32 dims: [1, -1] }]
"""
_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""


@contextlib.contextmanager
def ours() -> Iterator[list[str]]:
    """Our server; the lines that it printed, its addresses among them."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"config.pbtxt": _CONFIG, "1/model.py": _MODEL}
        for name, text in files.items():
            file = Path(folder, "identity", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "tengserve_adapter", "serve", "--http-port", "0", "--grpc-port", "0"]
        with started([*command, "--model-repository", folder], "tengserve is ready") as lines:
            yield lines


def addresses(lines: Sequence[str]) -> dict[str, str]:
    """Where a server listens, from what it printed: `http` and `grpc`, each host:port."""
    text = "\n".join(lines)
    found = {
        "http": re.search(r"listens on http://(\S+)", text),
        "grpc": re.search(r"listens for gRPC on (\S+)", text),
    }
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise SystemExit(f"a server did not say where it listens for {' and '.join(missing)}")
    return {name: match[1] for name, match in found.items() if match is not None}


class Client:
    """The process that makes the requests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_FOLDER / "_bench_overhead_client.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, server: dict[str, str], case: Case, seconds: float) -> Sample:
        """Load a server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**asdict(case), "server": server, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the client has ended: what it says above is why")
        return Sample(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(client: Client, servers: Sequence[dict[str, str]], case: Case, rounds: int, seconds: float) -> float:
    """Print the row of one case; the ratio of the throughputs."""
    samples: list[list[Sample]] = [[], []]
    for number in range(rounds):
        # Each goes first as often as the other, so that a machine that slows down is nobody's fault.
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            samples[index].append(client.measure(servers[index], case, seconds))
    ours, stock = map(summary, samples)
    print(row(case, ours, stock), flush=True)
    return ours.per_second / stock.per_second


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench overhead", description=__doc__)
    parser.add_argument("--routes", nargs="+", choices=_ROUTES, default=_ROUTES, help="(default: all)")
    parser.add_argument("--elements", nargs="+", type=int, default=[16, 16384], help="FP32 values (default 16 16384)")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16], help="requests at once (default 1 16)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs that are measured (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default 2)")
    parser.add_argument("--at-least", type=float, help="status 1 when a ratio of throughputs is lower")
    options = parser.parse_args()
    if min(*options.elements, *options.concurrency, options.rounds) < 1 or not 0 < options.seconds <= 600:
        parser.error("it takes at least 1 element, request at once and round, and up to 600 seconds")
    # By default SIGTERM ends Python at once, and the servers would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cases = [
        Case(route, elements, concurrency)
        for route in options.routes
        for elements in options.elements
        for concurrency in options.concurrency
    ]
    with contextlib.ExitStack() as stack:
        stock = [sys.executable, str(_FOLDER / "_bench_overhead_stock.py")]
        servers = [
            addresses(stack.enter_context(ours())),
            addresses(stack.enter_context(started(stock, "stock kserve is ready"))),
        ]
        client = Client()
        stack.callback(client.close)
        print(
            f"{options.rounds} rounds of {options.seconds:g} s each, medians; {os.cpu_count()} CPU cores, load average "
            f"{os.getloadavg()[0]:.1f}; ours / stock kserve"
        )
        print(heading())
        lowest = min(measure(client, servers, case, options.rounds, options.seconds) for case in cases)
        print(f"lowest ratio of throughputs: {lowest:.2f}; load average at the end {os.getloadavg()[0]:.1f}")
    if options.at_least is not None and lowest < options.at_least:
        print(f"a ratio is below {options.at_least:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
