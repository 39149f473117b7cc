"""Thousands of short requests with random cancels against an engine in this process, over a tiny random model.

Afterwards every request has ended exactly once, every block of the KV cache is back, memory is where it was after the
warm-up, and no thread is left. The status is 1 when one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("backend", "tests")]

WARM_UP_SHARE = 1 / 3
MEMORY_TOLERANCE = 8 * 2**20
"""Growth from the end of the warm-up that is no leak: the C library's arenas keep moving by a few megabytes. A leak of
one event a token would be over twice that at the default number of requests."""


CACHE_BYTES = 512 * 2**10
"""So little that requests have to be preempted now and then."""


def resident() -> int:
    """Bytes of this process's memory that are its own, when all that could be given back is."""
    from tengserve_backend.devices.cpu import CpuDevice

    gc.collect()
    CpuDevice().release_memory()
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


async def run(folder: Path, requests: int, concurrency: int, timeout_s: float) -> list[str]:
    """What is wrong; figures are printed."""
    from tengserve_backend.devices.npu.guard import import_torch

    import_torch()
    from support.soak import soak
    from tengserve_backend.engine.load import load_engine
    from tengserve_backend.repository.memory_budget import MemoryBudget
    from tengserve_backend.repository.settings import ModelSettings
    from tengserve_backend.repository.source import ModelSource

    settings = ModelSettings(
        device="cpu",
        max_seq_len=128,
        max_batch_size=16,
        max_waiting_tokens=4096,
        dtype="float32",  # whose size CACHE_BYTES is made for
        kv_cache_memory=MemoryBudget(bytes=CACHE_BYTES),
    )
    engine = load_engine(ModelSource("soak", "1", folder, settings), folder, lambda stage, fraction: None)
    warm_up = int(requests * WARM_UP_SHARE)
    memory: list[int] = []

    def on_end(count: int) -> None:
        if count == warm_up:
            memory.append(resident())

    wrong: list[str] = []
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await soak(engine, requests=requests, concurrency=concurrency, on_end=on_end)
        took = time.perf_counter() - began
        if not await engine.drain(10.0):
            wrong.append("requests are left in the engine")
        status = engine.status()
        memory.append(resident())  # While the engine still has what it may have kept.
    except TimeoutError:
        return [f"the requests did not end in {timeout_s:g} s"]
    finally:
        engine.stop()
    wrong += outcome.wrong[:10]
    if outcome.ends.total() != requests:
        wrong.append(f"{outcome.ends.total()} of {requests} requests ended")
    if status.free_blocks + status.cached_blocks != status.total_blocks:
        wrong.append(f"blocks: {status.free_blocks} free and {status.cached_blocks} cached of {status.total_blocks}")
    growth = memory[-1] - memory[0]
    if growth > MEMORY_TOLERANCE:
        wrong.append(f"memory grew by {growth / 2**20:.1f} MiB after the warm-up")
    print(f"requests    {requests} at concurrency {concurrency} in {took:.1f} s: {dict(outcome.ends)}")
    print(f"tokens      {outcome.tokens}, {status.steps} steps, {status.preemptions} preemptions")
    print(f"blocks      {status.free_blocks} free and {status.cached_blocks} cached of {status.total_blocks}")
    print(
        f"memory      {memory[0] / 2**20:.1f} MiB after {warm_up} requests, {memory[-1] / 2**20:.1f} MiB at the end "
        f"(may grow by {MEMORY_TOLERANCE / 2**20:.0f})"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, metavar="N")
    parser.add_argument("--concurrency", type=int, default=20, metavar="N")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    arguments = parser.parse_args()

    from support.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        folder = build_tiny_model(Path(directory))
        before = set(threading.enumerate())
        wrong = asyncio.run(run(folder, arguments.requests, arguments.concurrency, arguments.timeout))
    left = [thread.name for thread in set(threading.enumerate()) - before]
    print(f"threads     {len(left)} left")
    if left:
        wrong.append(f"threads are left: {', '.join(sorted(left))}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
