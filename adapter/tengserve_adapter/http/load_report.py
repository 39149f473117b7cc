"""How busy an engine is, in a header of its answers: what gateways balance by, as ORCA has it.

A request with `endpoint-load-metrics-format: json` (or `text`) has `endpoint-load-metrics` in its answer, as it is when
the answer begins.
"""

from __future__ import annotations

import contextlib
import json
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Send

from tengserve_backend.engine.base import Engine, EngineStatus
from tengserve_backend.errors import TengserveError

FORMAT_HEADER: Final = "endpoint-load-metrics-format"
REPORT_HEADER: Final = "endpoint-load-metrics"


def reporting(request: Request, engine: Engine, send: Send) -> Send:
    """A send that adds the report to the head of an answer; the same send when the request asks for none."""
    asked = request.headers.get(FORMAT_HEADER)
    if asked not in ("json", "text"):
        return send

    async def with_report(message: Message) -> None:
        if message["type"] == "http.response.start":
            # A model that was unloaded just now has no status, and its answer goes on all the same.
            with contextlib.suppress(TengserveError):
                header = (REPORT_HEADER.encode(), _report(engine.status(), asked).encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return with_report


def _report(status: EngineStatus, form: str) -> str:
    used = status.total_blocks - status.free_blocks - status.cached_blocks
    metrics = {
        "kv_cache_utilization": used / max(1, status.total_blocks),
        "max_token_capacity": status.total_blocks * status.block_size,
    }
    if form == "json":
        return "JSON " + json.dumps({"named_metrics": metrics}, separators=(",", ":"))
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
