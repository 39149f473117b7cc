"""Prints, as JSON, the process's memory while a model is loaded and after it was unloaded, six times over.

A program of its own: in a process that has run other tests, what they left to the allocator hides what a model takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import psutil

from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.load import load_model
from tengserve_backend.repository.manager import ModelManager
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource


async def main(folder: Path) -> None:
    settings = dataclasses.replace(ModelSettings(), device="cpu", dtype="float32", cpu_kernels="off", max_seq_len=256)
    manager = ModelManager([], load_model)
    process = psutil.Process()
    memory: dict[str, list[int]] = {"loaded": [], "unloaded": []}
    for _ in range(6):
        await asyncio.to_thread(manager.load, ModelSource("big", "1", folder, settings))
        generation = await manager.engine("big").submit(GenerationRequest("r", "hello" * 20, max_new_tokens=4))
        async for _event in generation:
            pass
        del generation
        memory["loaded"].append(process.memory_info().rss)
        await asyncio.to_thread(manager.unload, "big")
        memory["unloaded"].append(process.memory_info().rss)
    manager.stop()
    sys.stdout.write(json.dumps(memory))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
