"""The KServe model server, with our routes in front of its own, on the address that was asked for and no other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import Response

from tengserve_adapter.grpc.server import GrpcServer
from tengserve_adapter.grpc.service import Served
from tengserve_adapter.http.app import install
from tengserve_adapter.http.connection import KEEP_ALIVE_S, BoundedHttpProtocol
from tengserve_adapter.http.endpoints import Context
from tengserve_adapter.http.errors import response_for
from tengserve_adapter.http.health import Health
from tengserve_adapter.kserve.repository import TengserveModelRepository, TengserveRepositoryExtension
from tengserve_adapter.kserve.sdk import KSERVE_METRICS, ModelServer, RESTServer, app
from tengserve_adapter.lifecycle import CLOSE_TIMEOUT_S, Lifecycle
from tengserve_adapter.listener import make_room_for, url_of
from tengserve_adapter.observability.metrics import EngineCollector, RequestMetrics, quiet_metrics
from tengserve_adapter.observability.triton_metrics import TritonCollector
from tengserve_adapter.progress import ProgressPrinter, ready_text, sample_commands, say, tensor_commands
from tengserve_adapter.repository_control import RepositoryControl
from tengserve_adapter.settings import ServerSettings
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import TengserveError
from tengserve_backend.garbage import leave_out_of_collections
from tengserve_backend.inference import TensorModel
from tengserve_backend.repository.live import LiveRepository
from tengserve_backend.repository.load import load_model
from tengserve_backend.repository.manager import ModelManager, ModelState
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.overlays import Overlays, remove_left_behind
from tengserve_backend.repository.source import ModelSource, Progress


def serve(
    settings: ServerSettings, sources: Sequence[ModelSource], listener: socket.socket, progress: ProgressPrinter
) -> int:
    """Serve these models on this socket until told to stop; the process's exit status."""

    remove_left_behind()
    overlays = Overlays()

    def load(source: ModelSource, report: Progress) -> Engine | TensorModel:
        began = time.monotonic()
        try:
            model = load_model(
                source,
                report,
                live,
                device=settings.device,
                step_profile=settings.step_profile,
                request_timeout_s=settings.request_timeout_s,
            )
        except BaseException:
            progress.failed()
            raise
        progress.loaded(source.name, time.monotonic() - began)
        return model

    models = ModelManager(sources, load, progress, released=overlays.release)
    live = LiveRepository(settings.model_repository, ControlMode(settings.model_control_mode), models, overlays)
    try:
        return TengserveServer(settings, models, live, listener, clean_up=overlays.close).start()
    finally:
        overlays.close()


class TengserveServer(ModelServer):  # type: ignore[misc]  # kserve ships no type information
    """KServe's ModelServer with one worker, our own gRPC, our routes, our socket and our lifecycle.

    KServe's own `start` refuses models that are not loaded, listens on 0.0.0.0 and closes the listener before anything
    else; so `start` is replaced as a whole, and the parts that it would put together (registry, data plane, routes,
    metrics) are used as they are.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: ModelManager,
        live: LiveRepository,
        listener: socket.socket,
        *,
        clean_up: Callable[[], None],
    ) -> None:
        """Nothing listens yet.

        Args:
            settings, models, live, listener: what is served, and where.
            clean_up: what must not be left undone when the process ends without waiting for anything.
        """
        super().__init__(
            http_port=listener.getsockname()[1],
            workers=1,
            registered_models=TengserveModelRepository(models),
            enable_grpc=False,
            enable_docs_url=False,
            enable_latency_logging=False,
            access_log_format=None,
            ssl_certfile=None,
            ssl_keyfile=None,
        )
        self._settings = settings
        self._models = models
        self._listener = listener
        self._url = url_of(listener)
        self._lifecycle = Lifecycle(
            models,
            drain_timeout_s=settings.drain_timeout_s,
            pre_drain_delay_s=settings.pre_drain_delay_s,
            exit_on_error=settings.exit_on_error,
            announce=self._announce,
            clean_up=clean_up,
        )
        self._control = RepositoryControl(live, models, draining=self._lifecycle.draining)
        self.model_repository_extension = TengserveRepositoryExtension(self.registered_models, self._control)

    def start(self, models: Sequence[Any] = ()) -> int:
        """Serve until told to stop; blocks, in the main thread.

        Args:
            models: further KServe models, beside those of the model repository.

        Returns:
            The process's exit status.
        """
        for model in models:
            self.register_model(model)
        # KServe's histograms are for models of its own kind.
        quiet_metrics([] if models else KSERVE_METRICS)
        make_room_for(self._settings.max_connections * (2 if self._settings.grpc else 1))
        http = functools.partial(BoundedHttpProtocol, max_connections=self._settings.max_connections)
        config = uvicorn.Config(
            self._application(),
            # uvicorn calls it with keyword arguments, as it would call the class.
            http=cast("type[asyncio.Protocol]", http),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        server = _HttpServer(config, self._url)
        leave_out_of_collections()
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(self._run(server))

    async def _run(self, server: _HttpServer) -> int:
        if self._settings.grpc:
            server.grpc = self._v2_grpc_server()
            server.grpc_address = await server.grpc.start()
        async with self._control.polling(self._settings.repository_poll_secs):
            return await self._lifecycle.run(server, server.serve(sockets=[self._listener]))

    def _v2_grpc_server(self) -> GrpcServer:
        draining = self._lifecycle.draining
        health = Health(Context(self.registered_models, self._settings.http(), draining))
        served = Served(self.registered_models, self._control, health.check_live, health.check_ready, draining)
        host: str = self._listener.getsockname()[0]
        return GrpcServer(served, self._settings.grpc_settings(host, metadata.version("tengserve")))

    def _application(self) -> FastAPI:
        """KServe's application, ours first: the first route that matches wins."""
        draining = self._lifecycle.draining
        install(app, self.registered_models, self._settings.http(), control=self._control, draining=draining)
        app.add_middleware(RequestMetrics)
        REGISTRY.register(EngineCollector(self._models))
        REGISTRY.register(TritonCollector(self._models))
        _Routes("", self.dataplane, self.model_repository_extension, self.http_port).create_application()
        # KServe's handler tells the client the exception's class and text.
        app.add_exception_handler(Exception, _unexpected)
        application: FastAPI = app
        return application

    def _announce(self) -> None:
        statuses = self._models.statuses()
        ready = list(dict.fromkeys(status.name for status in statuses if status.state is ModelState.READY))
        failed = [name for name in dict.fromkeys(status.name for status in statuses) if name not in ready]
        default = self._settings.default_model or self._models.default_name()
        candidates = [default] if default in ready else ready
        # An LLM first: it needs the fewest words to ask.
        commands = self._llm_commands(candidates, default) or self._tensor_commands(candidates)
        say(ready_text(self._url, ready, failed, default, commands))

    def _llm_commands(self, names: Sequence[str], default: str | None) -> list[str]:
        for name in names:
            with contextlib.suppress(TengserveError):  # It takes tensors, or was unloaded just now.
                return sample_commands(self._url, self._models.engine(name).info, is_default=name == default)
        return []

    def _tensor_commands(self, names: Sequence[str]) -> list[str]:
        for name in names:
            with contextlib.suppress(TengserveError):  # It was unloaded just now.
                return tensor_commands(self._url, name, self._models.tensor_model(name).inputs)
        return []


class _Routes(RESTServer):  # type: ignore[misc]  # kserve ships no type information
    """KServe's routes and error handlers without its timing of requests: that matches each request with every route
    once more, for log lines that are off."""

    def _add_middlewares(self, _app: FastAPI) -> None:
        return


class _HttpServer(uvicorn.Server):
    """uvicorn that says when it listens, leaves signals to the lifecycle, and ends together with the gRPC server.

    Attributes:
        listening: set when it does.
        grpc, grpc_address: the gRPC server, if there is one, and where it listens already.
    """

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.grpc: GrpcServer | None = None
        self.grpc_address = ""
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say(f"tengserve listens on {self._url} and loads its models")
        if self.grpc_address:
            say(f"tengserve listens for gRPC on {self.grpc_address}")
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends = [super().shutdown(sockets)]
        if self.grpc is not None:
            ends.append(self.grpc.stop(CLOSE_TIMEOUT_S))
        await asyncio.gather(*ends)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _unexpected(_request: Request, error: Exception) -> Response:
    return response_for(error)
