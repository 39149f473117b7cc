"""The generation endpoints: socket to call, call to answer, every error to a reply."""

from __future__ import annotations

import difflib
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from prometheus_client import Counter
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tengserve_adapter.http.answer import answer
from tengserve_adapter.http.body import parse_body, read_body
from tengserve_adapter.http.disconnect import while_connected
from tengserve_adapter.http.edge import answered
from tengserve_adapter.http.errors import response_for
from tengserve_adapter.http.load_report import reporting
from tengserve_adapter.http.models import Models
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.sse import DirectWriter, direct_writer
from tengserve_adapter.protocols import generate, mindie, triton_llm
from tengserve_adapter.protocols.call import Call
from tengserve_backend.engine.base import Engine, ModelInfo
from tengserve_backend.errors import ModelNotFoundError, ShuttingDownError, shown
from tengserve_backend.generation.body import Ignored
from tengserve_backend.inference import TensorModel

_LOG = logging.getLogger(__name__)
_C = TypeVar("_C")
"""What a dialect makes of a body."""

_MAX_NAMES: Final = 3
_MAX_NAME_CHARS: Final = 256

IGNORED_FIELDS_LABELS: Final = ("endpoint",)
IGNORED_FIELDS: Final = Counter(
    "tengserve_ignored_fields",
    "Request fields that no dialect knows, by endpoint.",
    IGNORED_FIELDS_LABELS,
)


@dataclass(frozen=True, slots=True)
class Context:
    """What every route works with."""

    models: Models
    settings: HttpSettings
    draining: Callable[[], bool]

    def engine(self, name: str, version: str | None = None) -> Engine:
        """The engine of a model named in a URL.

        Raises:
            ModelNotFoundError, ModelNotReadyError: it cannot serve.
            InvalidRequestError: it takes tensors and generates no text.
        """
        try:
            return self.models.engine(name, version)
        except ModelNotFoundError:
            suffix = "" if version is None else f" version {shown(version)}"
            hint = self._meant(name) if version is None else "."
            raise ModelNotFoundError(f"Model {shown(name)}{suffix} not found{hint}", field="model") from None

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        """The model of tensors named in a URL.

        Raises:
            ModelNotFoundError, ModelNotReadyError: it cannot serve. The first says so in Triton's words, which clients
                compare.
        """
        try:
            return self.models.tensor_model(name, version)
        except ModelNotFoundError:
            suffix = "" if version is None else f" version {shown(version)}"
            raise ModelNotFoundError(
                f"Request for unknown model: '{shown(name)}'{suffix} is not found", field="model"
            ) from None

    def _meant(self, name: str) -> str:
        """The end of the sentence, with what the client may have meant: models with a similar name, else a few."""
        names = list(dict.fromkeys(status.name for status in self.models.statuses()))
        near = difflib.get_close_matches(name[:_MAX_NAME_CHARS], names, n=_MAX_NAMES)
        if near:
            return f"; did you mean {' or '.join(near)}?"
        return f"; this server has {', '.join(names[:_MAX_NAMES])}." if names else "."

    def default_engine(self) -> Engine:
        """The engine for a URL that names no model.

        Raises:
            ModelNotFoundError, ModelNotReadyError: it cannot serve.
        """
        name = self.settings.default_model or self.models.default_name()
        if name is not None:
            return self.engine(name)
        if not self.models.statuses():
            raise ModelNotFoundError("This server has no model.", field="model")
        raise ModelNotFoundError(
            "This URL names no model and the server has several: start it with --default-model, "
            "or use /v2/models/{model}/generate.",
            field="model",
        )


class GenerationEndpoint(ABC, Generic[_C]):
    """An ASGI endpoint: everything between a socket and a dialect's parser.

    Subclasses name the model, parse the body and answer what came of it.
    """

    label: str
    """The URL's pattern, for metrics: never anything that a client chose."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def _engine(self, request: Request) -> Engine:
        """The engine that the URL means."""

    @abstractmethod
    def _parse(self, request: Request, body: dict[str, object], info: ModelInfo) -> _C:
        """The body in the dialect of the URL."""

    @abstractmethod
    async def _answer(self, engine: Engine, parsed: _C, send: Send, writer: DirectWriter | None) -> None:
        """Send the answer; events may go through the writer, where there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing is raised but cancellation."""
        await answered(self._serve(Request(scope), receive, send), response_for, scope, receive, send)

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        if self._context.draining():
            raise ShuttingDownError("The service is stopping and takes no new requests.")
        # The model comes before the body: who asks for a model that is not here need not send a right body.
        engine = self._engine(request)
        # No name for the raw body: it is gone when it has been parsed.
        parsed = await parse_body(await read_body(receive), lambda body: self._parse(request, body, engine.info))
        answering = self._answer(engine, parsed, reporting(request, engine, send), direct_writer(request.scope))
        await while_connected(request.scope, receive, answering)


class CallEndpoint(GenerationEndpoint[Call]):
    """One whose body is one call."""

    async def _answer(self, engine: Engine, parsed: Call, send: Send, writer: DirectWriter | None) -> None:
        count_ignored(self.label, parsed.ignored)
        await answer(engine, parsed, send, writer=writer)


def count_ignored(label: str, ignored: Ignored) -> None:
    """Count a body's unknown fields, and log a few of their names.

    Args:
        label: the URL's pattern.
        ignored: what nobody knows.
    """
    if ignored.count:
        IGNORED_FIELDS.labels(label).inc(ignored.count)
        _LOG.debug("%s: %d unknown fields ignored, such as %s", label, ignored.count, ignored.names)


class NativeEndpoint(CallEndpoint):
    """`POST /infer` and `POST /infer_token`."""

    def __init__(self, context: Context, url: mindie.Url, label: str) -> None:
        super().__init__(context)
        self._url = url
        self.label = label

    def _engine(self, request: Request) -> Engine:
        return self._context.default_engine()

    def _parse(self, request: Request, body: dict[str, object], info: ModelInfo) -> Call:
        limit = self._context.settings.max_infer_text_chars
        return mindie.parse(self._url, body, info, max_text_chars=limit, request_id=_new_request_id())


class GenerateEndpoint(CallEndpoint):
    """`POST /v2/models/{m}[/versions/{v}]/generate` and `/generate_stream`."""

    def __init__(self, context: Context, label: str, *, stream: bool) -> None:
        super().__init__(context)
        self._stream = stream
        self.label = label

    def _engine(self, request: Request) -> Engine:
        return self._context.engine(request.path_params["model"], request.path_params.get("version"))

    def _parse(self, request: Request, body: dict[str, object], info: ModelInfo) -> Call:
        parse = triton_llm.parse if triton_llm.is_triton(body) else generate.parse
        return parse(
            body,
            info,
            model_name=request.path_params["model"],
            stream=self._stream,
            max_text_chars=self._context.settings.max_generate_text_chars,
            request_id=_new_request_id(),
        )


def _new_request_id() -> str:
    return uuid.uuid4().hex
