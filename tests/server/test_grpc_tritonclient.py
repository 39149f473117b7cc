"""Triton's own gRPC clients, every public method of them, against our server."""

from __future__ import annotations

import asyncio

import pytest

from support.grpc_client import running
from support.triton_process import run_client

WAIT_S = 60.0


@pytest.mark.parametrize("kind", ["sync", "aio"])
async def test_every_method_of_the_client(kind: str) -> None:
    async with running() as server:
        called = set((await run_client(kind, server.address)).split())
        assert called >= set((await run_client("methods", kind)).split())
        assert ("load", "other", {"max_batch_size": 4}, {"1/model.py": b"x"}) in server.control.told
        # What a client has cancelled, or let run out, no longer runs.
        for name, count in (("endless", 1), ("gated", 1)):
            model = server.models.models[name]
            for _ in range(count):
                await asyncio.wait_for(model.cancelled.get(), WAIT_S)
