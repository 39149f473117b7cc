"""KServe's v1 `:predict`: all instances of a request at once, answered together."""

from __future__ import annotations

import asyncio
import uuid

import orjson
from starlette.requests import Request
from starlette.types import Send

from tengserve_adapter.http.answer import answer_of, whole_answer
from tengserve_adapter.http.endpoints import GenerationEndpoint, count_ignored
from tengserve_adapter.http.sse import DirectWriter, send_json
from tengserve_adapter.protocols import predict
from tengserve_adapter.protocols.call import Call
from tengserve_backend.engine.base import Engine, ModelInfo


class PredictEndpoint(GenerationEndpoint[list[Call]]):
    """`POST /v1/models/{m}:predict`."""

    label = "/v1/models/{model}:predict"

    def _engine(self, request: Request) -> Engine:
        return self._context.engine(request.path_params["model"])

    def _parse(self, request: Request, body: dict[str, object], info: ModelInfo) -> list[Call]:
        return predict.parse(
            body,
            info,
            model_name=request.path_params["model"],
            max_text_chars=self._context.settings.max_generate_text_chars,
            request_id=uuid.uuid4().hex,
        )

    async def _answer(self, engine: Engine, parsed: list[Call], send: Send, writer: DirectWriter | None) -> None:
        for call in parsed:
            count_ignored(self.label, call.ignored)
        await send_json(send, predict.answer(await _texts(engine, parsed)))


async def _texts(engine: Engine, calls: list[Call]) -> list[str]:
    """The first error ends the others, so that no instance goes on for an answer that nobody gets."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_text(engine, call)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _text(engine: Engine, call: Call) -> str:
    text: str = orjson.loads(answer_of(call.reply, await whole_answer(engine, call.request)))["text_output"]
    return text
