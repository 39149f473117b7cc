"""Business logic scripting: a model asks other models of the process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tengserve_backend.errors import (
    ModelExecutionError,
    ModelNotFoundError,
    ModelNotReadyError,
    RequestError,
    TengserveError,
)
from tengserve_backend.inference import Cancellation, InferRequest, TensorModel
from tengserve_backend.inference.codes import triton_code
from tengserve_backend.python_backend.api.errors import TritonError, TritonModelException
from tengserve_backend.python_backend.api.messages import InferenceRequest, InferenceResponse

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Peers(Protocol):
    """The other models, and what a model may do to them. Called from threads of models; may block."""

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """A model that is ready; raises ModelNotFoundError or ModelNotReadyError."""
        ...

    def load(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model of the repository; raises TengserveError."""
        ...

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model; raises TengserveError."""
        ...


class BlsLoop:
    """The event loop on which a model's own requests run; a thread that starts with the first. Ends with `stop`.

    Args:
        model: the model that asks, for the thread's name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine there.

        Raises:
            TritonModelException: the model is being unloaded.
        """
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise TritonModelException("The model is being unloaded.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._loop,), name=f"bls {self._model}", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what runs and end the thread. Harmless when called again."""
        with self._lock:
            self._stopped = True
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class ResponseIterator:
    """The responses of a decoupled model, as it makes them. Once they have all come, they can be iterated again."""

    def __init__(self, loop: BlsLoop, responses: AsyncIterator[InferenceResponse], cancellation: Cancellation) -> None:
        self._loop = loop
        self._responses = responses
        self._cancellation = cancellation
        self._seen: list[InferenceResponse] = []
        self._at = 0
        self._done = False

    async def begin(self) -> None:
        """Wait for the first response on an event loop, which the iteration would block; not part of the API."""
        self._see(await asyncio.wrap_future(self._loop.run(self._next())))

    def __iter__(self) -> ResponseIterator:
        if self._done and self._at == len(self._seen):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._at == len(self._seen):
            if not self._done:
                self._see(self._loop.run(self._next()).result())
            if self._done and self._at == len(self._seen):
                raise StopIteration
        self._at += 1
        return self._seen[self._at - 1]

    def cancel(self) -> None:
        """Ask the other model to end. What it still sends comes all the same; the last may be an error CANCELLED."""
        self._cancellation.ask()

    def _see(self, response: InferenceResponse | None) -> None:
        if response is None:
            self._done = True
        else:
            self._seen.append(response)

    async def _next(self) -> InferenceResponse | None:
        return await anext(self._responses, None)


class Bls:
    """What one loaded model can ask of its process.

    Args:
        model: the model that asks.
        peers: the others; None when the host knows none.
    """

    def __init__(self, model: str, peers: Peers | None) -> None:
        self._peers = peers
        self._process = os.getpid()
        self._loop = BlsLoop(model)
        self.open = False
        """Set while requests are served: in `initialize` and `finalize` no model may ask another."""

    def exec(self, request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
        """See InferenceRequest.exec."""
        self._check_open()
        if decoupled:
            return self._iterator(request)
        return self._loop.run(self._single(request)).result()

    async def async_exec(self, request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
        """See InferenceRequest.async_exec."""
        self._check_open()
        if decoupled:
            responses = self._iterator(request)
            await responses.begin()
            return responses
        return await asyncio.wrap_future(self._loop.run(self._single(request)))

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """See the API."""
        paths = {path.removeprefix("file:"): data for path, data in (files or {}).items()}
        self._change(lambda peers: peers.load(name, config or None, paths))

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """See the API."""
        self._change(lambda peers: peers.unload(name, unload_dependents=unload_dependents))

    def is_model_ready(self, name: str, version: str) -> bool:
        """See the API."""
        self._check_process()
        if self._peers is None:
            return False
        try:
            model = self._peers.tensor_model(name, version or None)
            return self._loop.run(_ready(model)).result()
        except TengserveError:
            return False

    def stop(self) -> None:
        """End what the model still asks."""
        self.open = False
        self._loop.stop()

    def _check_process(self) -> None:
        """A fork has the memory of this process and none of its threads: whoever asked there would wait for ever."""
        if os.getpid() != self._process:
            raise TritonModelException(
                "BLS is only supported in the process of the server, not in one that the model has started."
            )

    def _check_open(self) -> None:
        self._check_process()
        if not self.open:
            raise TritonModelException("BLS is only supported during the 'execute' function.")

    def _change(self, change: Any) -> None:
        self._check_process()
        if self._peers is None:
            raise TritonModelException("This server does not let models load or unload others.")
        try:
            change(self._peers)
        except TengserveError as error:
            raise TritonModelException(error.message) from error

    def _iterator(self, request: InferenceRequest) -> ResponseIterator:
        cancellation = Cancellation()
        asked = replace(request.to_infer(), cancellation=cancellation)
        return ResponseIterator(self._loop, self._responses(asked, decoupled=True), cancellation)

    async def _single(self, request: InferenceRequest) -> InferenceResponse:
        async for response in self._responses(request.to_infer(), decoupled=False):
            return response
        return InferenceResponse(error=TritonError("An error occurred while performing BLS request."))

    async def _responses(self, asked: InferRequest, *, decoupled: bool) -> AsyncIterator[InferenceResponse]:
        try:
            model = self._find(asked.model, asked.version)
            if model.decoupled and not decoupled:
                raise ModelExecutionError(
                    f"Model {asked.model} is using the decoupled. The current BLS request call doesn't support models "
                    f"using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                    f"'async_exec' calls for decoupled models.'"
                )
            responses = model.infer(asked)
            try:
                async for response in responses:
                    # Also the one without outputs that only says that it is the last: python_backend shows it.
                    yield InferenceResponse.from_infer(response)
            finally:
                close = getattr(responses, "aclose", None)
                if close is not None:
                    await close()
        except TengserveError as error:
            # As in Triton: what is refused before it runs says so.
            refused = f"Model {asked.model} - Error when running inference: " if isinstance(error, RequestError) else ""
            yield InferenceResponse(error=TritonError(refused + error.message, triton_code(error)))
        except Exception:  # noqa: BLE001 - another model's fault is a response, not this model's crash
            _log.exception("a request to model %s failed", asked.model)
            yield InferenceResponse(error=TritonError("An error occurred while performing BLS request."))

    def _find(self, name: str, version: str) -> TensorModel:
        try:
            if self._peers is None:
                raise ModelNotFoundError(name)
            return self._peers.tensor_model(name, version or None)
        except ModelNotFoundError as error:
            which = f"'{name}' version {version}" if version else f"'{name}'"
            raise ModelNotFoundError(f"Request for unknown model: {which} is not found") from error
        except ModelNotReadyError as error:
            message = f"Failed for execute the inference request. Model '{name}' is not ready."
            raise ModelNotReadyError(message) from error


async def _ready(model: TensorModel) -> bool:
    return await model.is_ready()
