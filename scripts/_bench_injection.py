"""What a long prompt does to running streams: the same streams with and without it, paired in one run.

Streams of /infer run; in every second round a long /infer_token prompt arrives once all of them are decoding. Printed
are the gaps between tokens of the streams: a good scheduler lets none grow beyond a few steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import httpx
from _bench import REQUEST_TIMEOUT_S, ROOT, own_server, requests, run_one

_DECODING_AFTER = 8
"""Tokens after which a stream surely decodes."""


def long_prompt(tokens: int, round_number: int) -> dict[str, Any]:
    """A prompt of this many tokens, different in each round so that no cache can know it."""
    ids = [100 + (position * 7 + round_number * 131) % 20_000 for position in range(tokens)]
    return {"input_id": ids, "parameters": {"do_sample": False, "max_new_tokens": 1}}


async def run_round(
    client: httpx.AsyncClient, bodies: list[dict[str, Any]], injected: dict[str, Any] | None
) -> list[float]:
    """Run the streams once; the gaps between their tokens, in seconds."""
    started = 0
    all_decode = asyncio.Event()

    def on_token(count: int) -> None:
        nonlocal started
        if count == _DECODING_AFTER:
            started += 1
            if started == len(bodies):
                all_decode.set()

    async def inject() -> None:
        await all_decode.wait()
        if injected is not None:
            response = await client.post("/infer_token", json=injected)
            if response.status_code != 200:
                raise SystemExit(f"/infer_token answered {response.status_code}: {response.text[:500]}")

    injection = asyncio.create_task(inject())
    answers = await asyncio.gather(*(run_one(client, body, on_token) for body in bodies))
    await injection
    gaps: list[float] = []
    for answer in answers:
        # Before all decode, prompts of the streams themselves are in the way.
        arrivals = answer.arrivals[_DECODING_AFTER:]
        gaps += [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return gaps


async def measure(url: str, streams: int, length: int, prompt: int, rounds: int) -> float:
    """Print each round; the median over the rounds of (largest gap / median gap) with the injection."""
    bodies = requests(streams, length, length)
    limits = httpx.Limits(max_connections=streams + 1)
    ratios = []
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        await run_round(client, bodies, None)
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}")
            for name, injected in (("without", None), ("with the prompt", long_prompt(prompt, number))):
                gaps = await run_round(client, bodies, injected)
                median, largest = statistics.median(gaps), max(gaps)
                print(
                    f"  {name:>16}: gap median {median * 1e3:7.1f} ms   largest {largest * 1e3:7.1f} ms"
                    f"   ratio {largest / median:5.2f}"
                )
            ratios.append(largest / median)
    ratio = statistics.median(ratios)
    print(f"largest gap / median gap with the prompt: {ratio:.2f} (median of {rounds})")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench injection", description=__doc__)
    parser.add_argument("--url", help="a running server; unset: one is started and ended")
    parser.add_argument(
        "--model-repository", type=Path, default=ROOT / "model_repository", help="for a server of its own"
    )
    parser.add_argument("--streams", type=int, default=8, help="running streams (default 8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each stream (default 128)")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the injected prompt (default 1500)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs that are measured (default 3)")
    parser.add_argument("--at-most", type=float, help="status 1 when the ratio is higher")
    options = parser.parse_args()
    if min(options.streams, options.prompt, options.rounds) < 1 or options.length < 2 * _DECODING_AFTER:
        parser.error(f"it takes at least 1 stream, prompt token and round, and {2 * _DECODING_AFTER} tokens a stream")
    # By default SIGTERM ends Python at once, and the server would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{options.streams} streams, a prompt of {options.prompt} tokens; {os.cpu_count()} CPU cores")
    place = contextlib.nullcontext(options.url) if options.url else own_server(options.model_repository)
    with place as url:
        ratio = asyncio.run(measure(url, options.streams, options.length, options.prompt, options.rounds))
    if options.at_most is not None and ratio > options.at_most:
        print(f"the ratio is above {options.at_most:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
