"""v2 ModelStreamInfer through tritonclient, one stream a request: the prompt's ids in, ids and text out.

tritonclient's gRPC client and KServe cannot be in one process, so nothing here may come near the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tengserve_adapter.bench.requests import AnswerError, Chunk, Request, with_fields


class GrpcAsk:
    """A way to ask one server; see dialects.Ask.

    Args:
        address: HOST:PORT.
        model: that is asked.
        fields: parameters; see `with_fields`.
    """

    def __init__(self, address: str, model: str, fields: Mapping[str, Any]) -> None:
        self._address = address
        self._model = model
        self._fields = fields
        self._client: Any = None

    async def __call__(self, request: Request) -> AsyncIterator[Chunk]:
        """See dialects.Ask."""
        if self._client is None:
            # Not before there is an event loop: its channel belongs to one.
            self._client = triton.InferenceServerClient(self._address)
        try:
            async for result, error in self._client.stream_infer(_once(self._arguments(request))):
                if error is not None:
                    raise AnswerError(f"the answer is an error: {error.message()[:500]}")
                yield _chunk(result)
        except InferenceServerException as error:
            raise AnswerError(f"the stream broke: {_explained(error.message())}") from error
        except grpc.aio.AioRpcError as error:
            # tritonclient wraps what its other calls raise, and not what comes out of a stream.
            raise AnswerError(f"the stream broke: {_explained(error.details())}") from error

    async def close(self) -> None:
        """Close the channel."""
        if self._client is not None:
            await self._client.close()

    def _arguments(self, request: Request) -> dict[str, Any]:
        ids = triton.InferInput("input_ids", [len(request.prompt.ids)], "INT32")
        ids.set_data_from_numpy(np.array(request.prompt.ids, np.int32))
        parameters = {
            "do_sample": False,
            "ignore_eos": True,
            "max_tokens": request.output_tokens,
            "stream": True,
            "return_num_input_tokens": True,
        }
        return {"model_name": self._model, "inputs": [ids], "parameters": with_fields(parameters, self._fields)}


def _explained(reason: str | None) -> str:
    """What gRPC complains of, bounded; where nothing speaks gRPC at the address, with what is likely the matter."""
    text = str(reason)[:500]
    if "failed to connect" in text:
        text = f"{text}. Is this the gRPC port? It is 8081 unless told otherwise"
    return text


async def _once(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield arguments


def _chunk(result: Any) -> Chunk:
    text, ids, count = (result.as_numpy(name) for name in ("text_output", "output_ids", "num_input_tokens"))
    return Chunk(
        b"".join(text.reshape(-1).tolist()).decode("utf-8", "replace") if text is not None else "",
        tuple(ids.reshape(-1).tolist()) if ids is not None else (),
        None,
        int(count.reshape(-1)[0]) if count is not None and count.size else None,
    )


async def only_model(address: str) -> str:
    """The name of the server's only model.

    Raises:
        AnswerError: there is none, or there are several.
    """
    client = triton.InferenceServerClient(address)
    try:
        index = await client.get_model_repository_index(as_json=True)
    except InferenceServerException as error:
        raise AnswerError(f"no list of models from {address}: {_explained(error.message())}") from error
    finally:
        await client.close()
    names = sorted({model["name"] for model in index.get("models", ()) if model.get("state", "READY") == "READY"})
    if len(names) != 1:
        raise AnswerError(f"the server has {len(names)} models ready, name one with --model")
    return str(names[0])
