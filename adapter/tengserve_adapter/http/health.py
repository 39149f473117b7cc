"""Health and metadata endpoints. Three questions, none of which waits for an engine's work.

live: no engine has died or hangs in a step. ready: the start has come to every model, at least one can answer, and
nothing drains; what is loaded or unloaded later does not matter while one can answer. A server that loads by request
is also ready while it has no model and none failed: it takes requests to load. Both answer 200 with an empty body, as
Triton and MindIE do, or 503 with the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version as package_version

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tengserve_adapter.http.endpoints import Context
from tengserve_adapter.http.errors import response_for
from tengserve_adapter.protocols.health import model_metadata, server_metadata
from tengserve_backend.errors import (
    EngineFailedError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelNotReadyError,
    ShuttingDownError,
)
from tengserve_backend.repository.entries import UNLOADED

Handler = Callable[[Request], Awaitable[Response]]


def _guarded(handler: Handler) -> Handler:
    """The handler with its errors mapped, a dead engine's to 503: health is about the server, not about a request."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineFailedError as error:
            return response_for(ModelNotReadyError(error.message))
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a reply, the unexpected is logged
            return response_for(error)

    return guarded


class Health:
    """The handlers, by name."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.live = _guarded(self._live)
        self.ready = _guarded(self._ready)
        self.server = _guarded(self._server)
        self.model = _guarded(self._model)
        self.model_ready = _guarded(self._model_ready)

    def check_live(self) -> None:
        """Raise EngineFailedError when an engine has died or hangs."""
        # A model whose engine died is UNAVAILABLE, and so is one that never loaded: only its engine tells them apart.
        for status in self._context.models.statuses():
            self._check_engine(status.name, status.version)

    def check_ready(self) -> None:
        """Raise a ServerError that says why the server cannot take requests now."""
        self._check_draining()
        ready, started = self._in_state("READY"), self._context.models.started()
        if not (ready and started):
            if loading := self._in_state("LOADING"):
                raise ModelNotReadyError(f"Model {loading[0][0]} is loading.")
            if not started:
                raise ModelNotReadyError("The server is starting.")
        if not ready:
            self._check_empty()
        self.check_live()

    def _check_empty(self) -> None:
        """Raise the reason why no model is ready, unless the server is meant to be without."""
        for status in self._context.models.statuses():
            if status.state.value == "UNAVAILABLE" and status.reason != UNLOADED:
                raise ModelNotReadyError(f"Model {status.name}: {status.reason}")
        if self._context.settings.ready_without_models:
            return
        if unloading := self._in_state("UNLOADING"):
            raise ModelNotReadyError(f"Model {unloading[0][0]} is unloading.")
        raise ModelNotReadyError("This server has no model.")

    async def _live(self, request: Request) -> Response:
        self.check_live()
        return Response()

    async def _ready(self, request: Request) -> Response:
        self.check_ready()
        return Response()

    async def _server(self, request: Request) -> Response:
        return _json(server_metadata(self._context.settings.server_name, package_version("tengserve")))

    async def _model(self, request: Request) -> Response:
        name: str = request.path_params["model"]
        model = self._context.tensor_model(name, request.path_params.get("version"))
        return _json(model_metadata(model, [version for other, version in self._in_state("READY") if other == name]))

    async def _model_ready(self, request: Request) -> Response:
        name: str = request.path_params["model"]
        version: str | None = request.path_params.get("version")
        model = self._context.tensor_model(name, version)
        self._check_draining()
        self._check_engine(name, version)
        if not await model.is_ready():
            raise ModelNotReadyError(f"Model {name} says that it is not ready.")
        return Response()

    def _in_state(self, state: str) -> list[tuple[str, str]]:
        return [
            (status.name, status.version) for status in self._context.models.statuses() if status.state.value == state
        ]

    def _check_draining(self) -> None:
        if self._context.draining():
            raise ShuttingDownError("The service is stopping.")

    def _check_engine(self, name: str, version: str | None) -> None:
        try:
            status = self._context.models.engine(name, version).status()
        except (ModelNotFoundError, ModelNotReadyError, InvalidRequestError):
            # It was unloaded since its status was taken, or takes tensors: neither is a failure of an engine.
            return
        if not status.alive:
            raise EngineFailedError(f"Model {name}: {status.failure or 'the engine has failed.'}")
        if status.seconds_since_step > self._context.settings.max_step_s:
            raise EngineFailedError(f"Model {name}: a step has been running for {status.seconds_since_step:.0f} s.")


def _json(data: dict[str, object]) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
