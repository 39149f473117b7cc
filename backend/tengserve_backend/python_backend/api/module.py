"""`triton_python_backend_utils` as one model sees it, and as code that belongs to no model finds it."""

from __future__ import annotations

import contextvars
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tengserve_backend.python_backend.api import helpers
from tengserve_backend.python_backend.api.errors import TritonError, TritonModelException
from tengserve_backend.python_backend.api.logger import make_logger
from tengserve_backend.python_backend.api.messages import (
    MEMORY_CPU,
    MEMORY_GPU,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    PreferredMemory,
)
from tengserve_backend.python_backend.api.metrics import MetricKind, ModelMetrics
from tengserve_backend.python_backend.api.model_config import ModelConfig
from tengserve_backend.python_backend.api.sender import InferenceResponseSender
from tengserve_backend.python_backend.api.tensor import Tensor
from tengserve_backend.python_backend.bls import Bls, ResponseIterator

NAME = "triton_python_backend_utils"

_current: contextvars.ContextVar[types.ModuleType | None] = contextvars.ContextVar(NAME, default=None)
_install_lock = threading.Lock()


def make_module(model: str, version_dir: Path, bls: Bls, metrics: ModelMetrics) -> types.ModuleType:
    """The module for one model: functions that act for the model know which it is, on whatever thread they run."""

    class BoundRequest(InferenceRequest):
        def exec(self, decoupled: bool = False) -> Any:
            return bls.exec(self, decoupled=decoupled)

        async def async_exec(self, decoupled: bool = False) -> Any:
            return await bls.async_exec(self, decoupled=decoupled)

    BoundRequest.__name__ = BoundRequest.__qualname__ = "InferenceRequest"

    class MetricFamily:
        """A family of metrics, on the server's page of metrics."""

        COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

        def __init__(self, name: str, description: str, kind: MetricKind) -> None:
            self._family = metrics.family(name, description, kind)

        def Metric(self, labels: Mapping[str, str] | None = None, buckets: list[float] | None = None) -> Any:  # noqa: N802 - the API's name
            """The metric with these labels; a histogram needs buckets."""
            return metrics.metric(self._family, labels, buckets)

    def get_model_dir() -> str:
        """The version folder."""
        return str(version_dir)

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model of the repository; returns when it is ready."""
        bls.load_model(model_name, config, files)

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model."""
        bls.unload_model(model_name, unload_dependents)

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        """Whether a model would take a request."""
        return bls.is_model_ready(model_name, model_version)

    module = types.ModuleType(NAME, "The python_backend API of tengserve.")
    public = {name: value for name, value in vars(helpers).items() if name.isupper() or callable(value)}
    vars(module).update(
        {name: value for name, value in public.items() if not name.startswith("_")},
        InferenceRequest=BoundRequest,
        InferenceResponse=InferenceResponse,
        InferenceResponseSender=InferenceResponseSender,
        InferenceTrace=InferenceTrace,
        Logger=make_logger(model),
        MetricFamily=MetricFamily,
        ModelConfig=ModelConfig,
        PreferredMemory=PreferredMemory,
        ResponseIterator=ResponseIterator,
        TRITONSERVER_MEMORY_CPU=MEMORY_CPU,
        TRITONSERVER_MEMORY_GPU=MEMORY_GPU,
        Tensor=Tensor,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        get_model_dir=get_model_dir,
        is_model_ready=is_model_ready,
        load_model=load_model,
        unload_model=unload_model,
    )
    return module


def enter(module: types.ModuleType) -> None:
    """Make a model's module the one that this thread's code finds, also code that is none of the model's files."""
    _current.set(module)
    with _install_lock:
        if NAME not in sys.modules:
            sys.modules[NAME] = _Dispatcher(NAME, "The module of the model on whose thread it is used.")


class _Dispatcher(types.ModuleType):
    """What an installed package gets when it imports the module: the model is known only when it is used."""

    def __getattr__(self, name: str) -> Any:
        module = _current.get()
        if module is None:
            raise AttributeError(f"{NAME}.{name} is there only on a thread that runs a model")
        return getattr(module, name)
