"""Concurrent streams against the same requests one after another, paired in one run.

Starts a server of its own unless --url names one. Every request is a greedy stream of /infer with its own prompt and
output length; both ways ask for exactly the same, and the answers must have the same token counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 600.0
MEASUREMENTS = {
    "serving": "every workload and load, also against other servers, after a look at their answers",
    "reference": "the right answers for serving, kept in a file",
    "injection": "what a long prompt does to running streams",
    "efficiency": "streams over HTTP against a bare loop of the same steps",
    "steps": "what makes a step longer",
    "overhead": "what v2 infer costs beside stock KServe",
    "quality": "what number formats cost in quality",
}
"""The words that `scripts/bench` takes, each a script of its own, and what it measures."""
_TOPICS = ("the sea", "a long train journey", "how bread is made", "the planets", "a small town in winter")


@dataclass
class Answer:
    """Times of one stream, in seconds from its submission."""

    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)


def requests(count: int, shortest: int, longest: int) -> list[dict[str, Any]]:
    """Requests whose outputs are spread evenly from the shortest to the longest, in a mixed order."""
    bodies = []
    for index in range(count):
        # A stride that is coprime with most counts, so that neighbours differ much in length.
        place = (index * 7) % count
        length = shortest + (longest - shortest) * place // max(1, count - 1)
        topic = _TOPICS[index % len(_TOPICS)]
        prompt = f"Write story number {index + 1}, about {topic}. " + "Describe it in detail. " * (index % 6)
        parameters = {"do_sample": False, "ignore_eos": True, "max_new_tokens": length, "details": True}
        bodies.append({"inputs": prompt, "stream": True, "parameters": parameters})
    return bodies


async def run_one(
    client: httpx.AsyncClient, body: dict[str, Any], on_token: Callable[[int], None] = lambda count: None
) -> Answer:
    """Run one stream; on_token is called with the number of tokens so far."""
    answer = Answer()
    start = time.perf_counter()
    last: dict[str, Any] = {}
    async with client.stream("POST", "/infer", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"/infer answered {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                answer.arrivals.append(time.perf_counter() - start)
                on_token(len(answer.arrivals))
                last = json.loads(line.removeprefix("data:"))
    if "error" in last or not last.get("details"):
        raise SystemExit(f"a stream ended without an end: {json.dumps(last)[:500]}")
    answer.tokens = last["details"]["generated_tokens"]
    return answer


async def measure(url: str, bodies: list[dict[str, Any]], rounds: int) -> float:
    """Print the figures of each round; the median of their throughput ratios."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        await run_one(client, bodies[0])
        ratios = []
        for number in range(1, rounds + 1):
            start = time.perf_counter()
            alone = [await run_one(client, body) for body in bodies]
            alone_s = time.perf_counter() - start
            start = time.perf_counter()
            together = await asyncio.gather(*(run_one(client, body) for body in bodies))
            together_s = time.perf_counter() - start
            if [answer.tokens for answer in alone] != [answer.tokens for answer in together]:
                raise SystemExit("the two ways generated different numbers of tokens: nothing to compare")
            print(f"round {number} of {rounds}")
            alone_throughput = report("one after another", alone, alone_s)
            ratios.append(report(f"{len(bodies)} at once", together, together_s) / alone_throughput)
    ratio = statistics.median(ratios)
    print(f"throughput at once / one after another: {ratio:.2f} (median of {rounds})")
    return ratio


def report(name: str, answers: list[Answer], wall_s: float) -> float:
    """One line of figures; the throughput in tokens a second."""
    throughput = sum(answer.tokens for answer in answers) / wall_s
    first = statistics.median(answer.arrivals[0] for answer in answers)
    gaps = [later - earlier for answer in answers for earlier, later in itertools.pairwise(answer.arrivals)]
    print(
        f"  {name:>18}: {throughput:8.1f} tokens/s   TTFT median {first * 1e3:8.1f} ms"
        f"   between tokens median {statistics.median(gaps) * 1e3 if gaps else 0.0:7.1f} ms"
    )
    return throughput


@contextlib.contextmanager
def own_server(repository: Path, *flags: str, grpc: bool = False) -> Iterator[str]:
    """A server on a free port, ended afterwards; its URL, or its HOST:PORT for gRPC."""
    # While its kernels are built a server answers on slower operators, beside a compiler; without one it says so.
    subprocess.run(
        [sys.executable, "-m", "tengserve_backend.native.build"],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    command = [sys.executable, "-m", "tengserve_adapter", "serve", "--http-port", "0", *flags]
    command += ["--grpc-port", "0"] if grpc else ["--no-grpc"]
    address = r"listens for gRPC on (\S+)" if grpc else r"listens on (http://\S+)"
    with started([*command, "--model-repository", str(repository)], "tengserve is ready") as lines:
        found = re.search(address, "\n".join(lines))
        if found is None:
            raise SystemExit("the server did not say where it listens")
        yield found[1]


@contextlib.contextmanager
def started(command: list[str], ready: str) -> Iterator[list[str]]:
    """A server's process, from the line with these words to the end of the block; the lines it printed until then."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    # Reading below blocks; a server that neither starts nor ends is ended here.
    watchdog = threading.Timer(START_TIMEOUT_S, server.kill)
    watchdog.start()
    try:
        assert server.stdout is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if ready in line:
                break
        else:
            raise SystemExit("the server did not become ready")
        watchdog.cancel()
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield lines
    finally:
        watchdog.cancel()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> int:
    listed = "\n".join(f"  {name:<12}{what}" for name, what in MEASUREMENTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=f"other measurements, each with a --help of its own:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", nargs="?", help="another measurement, as below; its name comes before its flags")
    parser.add_argument("--url", help="a running server; unset: one is started and ended")
    parser.add_argument(
        "--model-repository", type=Path, default=ROOT / "model_repository", help="for a server of its own"
    )
    parser.add_argument("--streams", type=int, default=16, help="requests, and streams at once (default 16)")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest output (default 16)")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest output (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="how often both ways are measured (default 3)")
    parser.add_argument("--at-least", type=float, help="status 1 when the ratio is lower")
    options = parser.parse_args()
    if options.other in MEASUREMENTS:
        parser.error(f"{options.other} comes before its flags: scripts/bench {options.other} ...")
    if options.other is not None:
        parser.error(f"there is no measurement {options.other!r}; there are:\n{listed}")
    if not (1 <= options.streams <= 1024 and 1 <= options.shortest <= options.longest and 1 <= options.rounds <= 100):
        parser.error("it takes 1 to 1024 streams, 1 <= shortest <= longest, and 1 to 100 rounds")
    # By default SIGTERM ends Python at once, and the server would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bodies = requests(options.streams, options.shortest, options.longest)
    print(f"{len(bodies)} streams of {options.shortest} to {options.longest} tokens; {os.cpu_count()} CPU cores")
    place = contextlib.nullcontext(options.url) if options.url else own_server(options.model_repository)
    with place as url:
        ratio = asyncio.run(measure(url, bodies, options.rounds))
    if options.at_least is not None and ratio < options.at_least:
        print(f"the ratio is below {options.at_least:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
