"""What is left of the engine's speed behind HTTP: streams of a server against the same steps in a bare loop, in turns.

A wave is so many greedy requests of random tokens at once, each run to its end. The server streams it over
/infer_token; the bare loop runs the scheduler's steps for it in this process, without a server, text or events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _bench import own_server
from _bench_engine import BareEngine, Wave
from _bench_weights import REPOSITORY, weights_folder

_TIMEOUT_S = 120.0


def wave(chooser: random.Random, concurrency: int, prompt: int, output: int, vocabulary: int) -> Wave:
    """Prompts that no cache knows."""
    first = min(100, vocabulary - 1)
    return Wave([[chooser.randrange(first, vocabulary) for _ in range(prompt)] for _ in range(concurrency)], output)


async def served_s(port: int, asked: Wave) -> float:
    """Seconds that the server takes for a wave, from the first byte sent to the last one received."""
    bodies = [
        json.dumps(
            {
                "input_id": prompt,
                "stream": True,
                "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": asked.output},
            }
        ).encode()
        for prompt in asked.prompts
    ]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
    began = time.perf_counter()
    async with asyncio.timeout(_TIMEOUT_S):
        counts = await asyncio.gather(
            *(_stream(*connection, body) for connection, body in zip(connections, bodies, strict=True))
        )
    seconds = time.perf_counter() - began
    if any(count != asked.output for count in counts):
        raise SystemExit(f"the streams had {counts} tokens instead of {asked.output}")
    return seconds


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """Ask, and count the events. Nothing is parsed: what the client computes is taken from the server's cores."""
    head = f"POST /infer_token HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count, rest = 0, b""
    while piece := await reader.read(2**16):
        rest += piece
        count += rest.count(b"data:")
        rest = rest[-4:] if not rest.endswith(b"data:") else b""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return count


def measure(engine: BareEngine, port: int, concurrency: int, lengths: tuple[int, int], rounds: int) -> float:
    """Print the rounds at a concurrency; the median of their ratios, served to bare, in tokens a second."""
    chooser = random.Random(concurrency)
    ratios = []
    for number in range(rounds + 1):
        waves = [wave(chooser, concurrency, *lengths, engine.vocabulary) for _ in range(2)]
        served = asyncio.run(served_s(port, waves[0]))
        bare = engine.wave_s(waves[1])
        if number:  # The first round warms both.
            ratios.append(bare / served)
            tokens = concurrency * lengths[1]
            print(
                f"  c{concurrency}: {tokens / served:7.1f} tokens/s served, {tokens / bare:7.1f} bare   ratio "
                f"{ratios[-1]:.2f}"
            )
    return statistics.median(ratios)


def report(ratios: dict[int, float], at_least: float | None) -> int:
    """Print the medians; the process's status."""
    for concurrency, ratio in ratios.items():
        print(f"served / bare at c{concurrency}: {ratio:.2f}")
    if at_least is not None and min(ratios.values()) < at_least:
        print(f"a ratio is below {at_least:g}", file=sys.stderr)
        return 1
    return 0


def _numbers(text: str) -> Sequence[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= 32 for number in numbers):
        raise ValueError
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench efficiency", description=__doc__)
    parser.add_argument(
        "--model-repository", type=Path, default=REPOSITORY, help="its only LLM is served (default: the quick start's)"
    )
    parser.add_argument("--concurrency", type=_numbers, default=[8, 16], help="requests at once (default 8,16)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs that are measured (default 5)")
    parser.add_argument("--at-least", type=float, help="status 1 when a ratio is lower")
    options = parser.parse_args()
    if not (1 <= options.rounds <= 100 and 1 <= options.prompt <= 2048 and 1 <= options.output <= 512):
        parser.error("it takes 1 to 100 rounds, prompts of 1 to 2048 tokens and outputs of 1 to 512")
    # By default SIGTERM ends Python at once, and the server would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running = 32  # The default of maxBatchSize.
    engine = BareEngine(
        weights_folder(options.model_repository),
        tokens=max(options.concurrency) * (options.prompt + options.output),
        running=running,
    )
    print(f"{engine.description}; {os.cpu_count()} CPUs; load average {os.getloadavg()[0]:.1f}")
    with own_server(options.model_repository) as url:
        port = int(url.rpartition(":")[2])
        lengths = (options.prompt, options.output)
        ratios = {
            concurrency: measure(engine, port, concurrency, lengths, options.rounds)
            for concurrency in options.concurrency
        }
    return report(ratios, options.at_least)


if __name__ == "__main__":
    sys.exit(main())
