"""What is asked of the engine and what it answers: frozen data and rules, no torch."""

from tengserve_backend.generation.events import (
    LOGPROB_FLOOR,
    Finish,
    FinishReason,
    NextToken,
    TokenEvent,
    TokenLogprobs,
)
from tengserve_backend.generation.limits import ModelLimits
from tengserve_backend.generation.request import MAX_LOGPROBS, GenerationRequest
from tengserve_backend.generation.sampling import MAX_LOGIT_BIASES, ResolvedSampling, SamplingParams

__all__ = [
    "LOGPROB_FLOOR",
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROBS",
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "ModelLimits",
    "NextToken",
    "ResolvedSampling",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
]
