"""Tensors in, tensors out: what v2 infer asks of a model, whatever serves it. Plain numpy, no protocol."""

from tengserve_backend.inference.datatypes import Datatype
from tengserve_backend.inference.model import (
    BatchStatistics,
    Configured,
    FailureReason,
    ModelStatistics,
    ResponseStatistics,
    Servable,
    TensorModel,
    TensorSpec,
)
from tengserve_backend.inference.request import (
    Cancellation,
    InferRequest,
    InferResponse,
    InferTensor,
    ParameterValue,
    RequestedOutput,
    SequenceFlags,
)

__all__ = [
    "BatchStatistics",
    "Cancellation",
    "Configured",
    "Datatype",
    "FailureReason",
    "InferRequest",
    "InferResponse",
    "InferTensor",
    "ModelStatistics",
    "ParameterValue",
    "RequestedOutput",
    "ResponseStatistics",
    "SequenceFlags",
    "Servable",
    "TensorModel",
    "TensorSpec",
]
