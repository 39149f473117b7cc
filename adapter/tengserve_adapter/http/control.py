"""Model control over HTTP: the repository, configuration, statistics, and the server's own switches.

Bodies are JSON whatever their Content-Type says, and may be empty. Errors are Triton's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tengserve_adapter.control import ModelControl
from tengserve_adapter.http.body import parse_body, read_body
from tengserve_adapter.http.body_rules import BodyRules, set_body_rules
from tengserve_adapter.http.disconnect import ClientDisconnected
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.triton_errors import triton_response
from tengserve_adapter.protocols import repository
from tengserve_backend.errors import ModelNotFoundError, UnsupportedError, shown

_T = TypeVar("_T")

_CLIENT_CLOSED: Final = 499
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = "/v2/models/{model}/versions/{version}"
_MEMORIES: Final = ("systemsharedmemory", "cudasharedmemory")

Handler = Callable[[Request], Awaitable[Response]]


def control_routes(control: ModelControl, settings: HttpSettings) -> list[Route]:
    """Every route of model control.

    Args:
        control: what they come to.
        settings: limits of their bodies.
    """
    endpoints = _Endpoints(control, settings)
    models = "/v2/repository/models/{model}"
    routes = [
        _post("/v2/repository/index", endpoints.index),
        _post(f"{models}/load", endpoints.load),
        _post(f"{models}/unload", endpoints.unload),
        # Before the routes of a model, which would take "stats" for its name.
        _get("/v2/models/stats", endpoints.statistics),
        *(_get(f"{base}/config", endpoints.config) for base in (_MODEL, _VERSION)),
        *(_get(f"{base}/stats", endpoints.statistics) for base in (_MODEL, _VERSION)),
        _get("/v2/logging", endpoints.log),
        _post("/v2/logging", endpoints.change_log),
    ]
    for path in ("/v2/repository/{repository}/index", "/v2/repository/{repository}/models/{model}/{verb}"):
        routes.append(_post(path, endpoints.other_repository))
    for path in ("/v2/trace/setting", f"{_MODEL}/trace/setting"):
        routes += [_get(path, endpoints.trace), _post(path, endpoints.change_trace)]
    for memory in _MEMORIES:
        for base in (f"/v2/{memory}", f"/v2/{memory}/region/{{region}}"):
            routes += [
                _get(f"{base}/status", endpoints.memory_status),
                _post(f"{base}/register", endpoints.register_memory),
                _post(f"{base}/unregister", endpoints.unregister_memory),
            ]
    return routes


def _get(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["POST"])


class _Endpoints:
    """The handlers, by name; each already answers its own errors."""

    def __init__(self, control: ModelControl, settings: HttpSettings) -> None:
        self._control = control
        self._settings = settings
        self.index = _guarded(self._index)
        self.load = _guarded(self._load)
        self.unload = _guarded(self._unload)
        self.config = _guarded(self._config)
        self.statistics = _guarded(self._statistics)
        self.log = _guarded(self._log)
        self.change_log = _guarded(self._change_log)
        self.trace = _guarded(self._trace)
        self.change_trace = _guarded(self._change_trace)
        self.other_repository = _guarded(self._other_repository)
        self.memory_status = _guarded(self._memory_status)
        self.register_memory = _guarded(self._register_memory)
        self.unregister_memory = _guarded(self._unregister_memory)

    async def _index(self, request: Request) -> Response:
        ready_only = await self._body(request, repository.parse_index)
        return _json(repository.index_json(await self._control.index(ready_only=ready_only)))

    async def _load(self, request: Request) -> Response:
        body = await self._body(request, repository.parse_load)
        await self._control.load(request.path_params["model"], body.config, body.files)
        return Response()

    async def _unload(self, request: Request) -> Response:
        dependents = await self._body(request, repository.parse_unload)
        await self._control.unload(request.path_params["model"], unload_dependents=dependents)
        return Response()

    async def _config(self, request: Request) -> Response:
        return _json(self._control.config(request.path_params["model"], request.path_params.get("version", "")))

    async def _statistics(self, request: Request) -> Response:
        name, version = request.path_params.get("model", ""), request.path_params.get("version", "")
        return _json({"model_stats": self._control.statistics(name, version)})

    async def _log(self, request: Request) -> Response:
        return _json(self._control.log_settings({}))

    async def _change_log(self, request: Request) -> Response:
        return _json(self._control.log_settings(await self._body(request, repository.parse_log)))

    async def _trace(self, request: Request) -> Response:
        settings = self._control.trace_settings(request.path_params.get("model", ""), {})
        return _json(repository.trace_json(settings))

    async def _change_trace(self, request: Request) -> Response:
        changes = await self._body(request, repository.parse_trace)
        settings = self._control.trace_settings(request.path_params.get("model", ""), changes)
        return _json(repository.trace_json(settings))

    async def _other_repository(self, request: Request) -> Response:
        raise UnsupportedError("'repository_name' specification is not supported")

    async def _memory_status(self, request: Request) -> Response:
        region = request.path_params.get("region")
        if region is not None:
            raise ModelNotFoundError(f"Unable to find shared memory region: '{shown(region)}'", field="region")
        return _json([])

    async def _register_memory(self, request: Request) -> Response:
        raise UnsupportedError("this server serves no shared memory: send tensors with the request")

    async def _unregister_memory(self, request: Request) -> Response:
        return Response()  # None is registered, so all are gone.

    async def _body(self, request: Request, parse: Callable[[dict[str, object]], _T]) -> _T:
        """The JSON object of a request, parsed further; an empty body is an empty object."""
        set_body_rules(request.scope, BodyRules(self._settings.max_body_bytes, encoded=False, respond=triton_response))
        raw = await read_body(request.receive)
        return await parse_body(raw or b"{}", parse)


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=_CLIENT_CLOSED)  # Nobody reads it.
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a reply, the unexpected is logged
            return triton_response(error)

    return guarded


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
