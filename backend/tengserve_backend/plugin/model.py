"""An LLM behind Triton's python_backend API, with the tensor names of the vLLM backend.

It needs `tengserve_backend` and `triton_python_backend_utils`, and nothing of the server around it: so the same file
works as `1/model.py` of a model here, and in a real Triton as a model's file or as the `model.py` of a python-based
backend. The `parameters` of config.pbtxt are the settings of docs/configuration.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

from tengserve_backend.devices.npu.guard import import_torch
from tengserve_backend.errors import TengserveError
from tengserve_backend.inference import (
    Datatype,
    InferRequest,
    InferResponse,
    InferTensor,
    RequestedOutput,
    SequenceFlags,
    TensorSpec,
)
from tengserve_backend.inference.codes import triton_code
from tengserve_backend.inference.llm import INPUTS, OUTPUTS, LlmTensorModel
from tengserve_backend.repository.settings import read_settings
from tengserve_backend.repository.source import ModelSource

CANCEL_POLL_S = 0.05
"""python_backend tells nobody that a client has left; it has to be asked."""

HOST_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""Parameters that are python_backend's own."""

_DATATYPES = {datatype.dtype: datatype for datatype in Datatype if datatype is not Datatype.BF16}


class TritonPythonModel:
    """One engine."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Say what goes in and out, so that config.pbtxt need not."""
        for spec in INPUTS:
            config.add_input({**_described(spec), "optional": True})
        for spec in OUTPUTS:
            config.add_output(_described(spec))
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model. Blocks until it can answer."""
        # Imported here because it brings torch: a configuration can be completed without.
        import_torch()
        from tengserve_backend.engine.load import load_engine
        from tengserve_backend.repository.weights import resolve_weights

        name, version = args["model_name"], args["model_version"]
        given = json.loads(args["model_config"]).get("parameters", {})
        parameters = {key: value["string_value"] for key, value in given.items() if key not in HOST_PARAMETERS}
        settings = read_settings(parameters, file=f"{name}/config.pbtxt")
        source = ModelSource(name, version, Path(args["model_repository"], version), settings)
        weights = resolve_weights(source, _report)
        self._model = LlmTensorModel(load_engine(source, weights, _report))

    async def execute(self, requests: list[Any]) -> None:
        """Answer; calls overlap, and the engine batches what they ask."""
        await asyncio.gather(*(self._answer(request, request.get_response_sender()) for request in requests))

    async def is_ready(self) -> bool:
        """Whether the engine lives."""
        return await self._model.is_ready()

    def finalize(self) -> None:
        """End the engine and give its memory back."""
        self._model.stop()

    async def _answer(self, request: Any, sender: Any) -> None:
        try:
            async for response in self._responses(request):
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if response.final else 0
                sender.send(_sent(response), flags=final)
        except TengserveError as error:
            code = getattr(pb_utils.TritonError, triton_code(error).name)
            failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message, code))
            sender.send(failure, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _responses(self, request: Any) -> AsyncGenerator[InferResponse]:
        """The engine's responses until the client leaves."""
        responses = cast("AsyncGenerator[InferResponse]", self._model.infer(_received(request, self._model)))
        try:
            while True:
                step = asyncio.ensure_future(anext(responses))
                while not (await asyncio.wait([step], timeout=CANCEL_POLL_S))[0]:
                    if request.is_cancelled():
                        step.cancel()
                        await asyncio.wait([step])
                        # The last response is owed all the same; nobody reads it.
                        yield InferResponse(self._model.name, self._model.version, request.request_id(), ())
                        return
                response = step.result()
                yield response
                if response.final:
                    return
        finally:
            await responses.aclose()


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.datatype.config_name, "dims": list(spec.shape)}


def _received(request: Any, model: LlmTensorModel) -> InferRequest:
    """A request of python_backend's, as the engine takes it."""
    tensors = []
    for tensor in request.inputs():
        data = tensor.as_numpy()
        tensors.append(InferTensor(tensor.name(), _DATATYPES[np.dtype(data.dtype)], data))
    return InferRequest(
        model=model.name,
        version=model.version,
        request_id=request.request_id(),
        inputs=tuple(tensors),
        # Without a choice python_backend names every output; the engine then sends what a client expects unasked.
        outputs=_chosen(request.requested_output_names()),
        parameters=json.loads(request.parameters() or "{}"),
        timeout_us=request.timeout(),
        sequence=SequenceFlags(request.correlation_id()),
    )


def _chosen(names: Any) -> tuple[RequestedOutput, ...]:
    chosen = tuple(map(RequestedOutput, names))
    return () if len(chosen) == len(OUTPUTS) else chosen


def _sent(response: InferResponse) -> Any:
    tensors = [pb_utils.Tensor(tensor.name, tensor.data) for tensor in response.outputs]
    return pb_utils.InferenceResponse(tensors)


def _report(stage: str, fraction: float) -> None:
    """python_backend shows nobody how far a load is; the log does."""
    if fraction == 0.0:
        pb_utils.Logger.log_info(stage)
