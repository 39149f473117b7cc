"""Installing the routes on an app: a fresh one in tests, KServe's in the server, before KServe adds its own."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tengserve_adapter.control import ModelControl
from tengserve_adapter.http.control import control_routes
from tengserve_adapter.http.endpoints import Context, GenerateEndpoint, NativeEndpoint
from tengserve_adapter.http.errors import error_body, error_response, response_for
from tengserve_adapter.http.health import Health
from tengserve_adapter.http.intake import BodyIntake
from tengserve_adapter.http.models import Models
from tengserve_adapter.http.predict import PredictEndpoint
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.tensor_generate import TensorGenerateEndpoint
from tengserve_adapter.http.tensors import InferEndpoint
from tengserve_adapter.protocols.mindie import Url
from tengserve_backend.errors import shown

_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = "/v2/models/{model}/versions/{version}"


def install(
    app: FastAPI, models: Models, settings: HttpSettings, *, control: ModelControl, draining: Callable[[], bool]
) -> None:
    """Add every route, the replies for what no route takes, and the bounds of request bodies, an app's own included.

    Routes are matched in order: those that answer with a model come first, as they are asked for most, and those of an
    app that adds its own later come last.

    Args:
        app: the application.
        models: what there is to serve.
        settings: the operator's.
        control: the repository that they come from.
        draining: whether nothing new is to be admitted.
    """
    context = Context(models, settings, draining)
    app.router.redirect_slashes = False
    app.router.routes.extend(
        [*_generation_routes(context), *control_routes(control, settings), *_health_routes(context)]
    )
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(BodyIntake, settings=settings, draining=draining)


def _generation_routes(context: Context) -> list[Route]:
    infer = InferEndpoint(context)
    routes = [
        *(Route(f"{base}/infer", infer, methods=["POST"]) for base in (_MODEL, _VERSION)),
        Route("/infer", NativeEndpoint(context, Url.INFER, "/infer"), methods=["POST"]),
        Route("/infer_token", NativeEndpoint(context, Url.INFER_TOKEN, "/infer_token"), methods=["POST"]),
    ]
    for verb, stream in (("generate", False), ("generate_stream", True)):
        llm = GenerateEndpoint(context, f"{_MODEL}/{verb}", stream=stream)
        endpoint = TensorGenerateEndpoint(context, llm, stream=stream)
        routes += [Route(f"{base}/{verb}", endpoint, methods=["POST"]) for base in (_MODEL, _VERSION)]
    routes.append(Route("/v1/models/{model}:predict", PredictEndpoint(context), methods=["POST"]))
    return routes


def _health_routes(context: Context) -> list[Route]:
    health = Health(context)
    return [
        Route("/v2/health/live", health.live),
        Route("/v2/health/ready", health.ready),
        Route("/v2", health.server),
        *(Route(base, health.model) for base in (_MODEL, _VERSION)),
        *(Route(f"{base}/ready", health.model_ready) for base in (_MODEL, _VERSION)),
    ]


async def _http_exception(request: Request, error: Exception) -> Response:
    """What routing itself refuses, 404 and 405 above all, keeps its status and headers."""
    if not isinstance(error, HTTPException):
        return response_for(error)
    error_type = "NotFoundError" if error.status_code == 404 else HTTPStatus(error.status_code).phrase
    return error_response(error.status_code, error_body(_words(request, error), error_type), error.headers or {})


def _words(request: Request, error: HTTPException) -> str:
    """Of what routing refuses it says no more than the status' name; so what was asked for is added."""
    path = shown(request.scope["path"])
    if error.detail == HTTPStatus.NOT_FOUND.phrase:
        return f"This server has no URL {path}"
    allowed = (error.headers or {}).get("Allow")
    if error.detail == HTTPStatus.METHOD_NOT_ALLOWED.phrase and allowed:
        return f"{path} takes {allowed}, not {shown(request.method)}"
    return str(error.detail)


async def _validation_error(request: Request, error: Exception) -> Response:
    """A body that another route's schema refuses; the framework's own words may repeat the body, so they are not."""
    return error_response(422, error_body("The request does not fit this endpoint.", "Input Validation Error"), {})


async def _unexpected(request: Request, error: Exception) -> Response:
    return response_for(error)
