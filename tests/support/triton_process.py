"""Triton's gRPC clients as a child process: see triton_grpc.py for what it does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

_CLIENT = Path(__file__).parent / "triton_grpc.py"
WAIT_S = 60.0


async def run_client(*arguments: str) -> str:
    """What the client's process printed; fails with what it complained of."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_CLIENT), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        printed, complaint = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complaint.decode()
    return printed.decode()
