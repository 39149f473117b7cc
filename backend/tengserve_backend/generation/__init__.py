"""What is asked of the engine and what it answers: frozen data and rules, no torch."""

from tengserve_backend.generation.events import Finish, FinishReason, TokenEvent
from tengserve_backend.generation.limits import ModelLimits
from tengserve_backend.generation.request import GenerationRequest
from tengserve_backend.generation.sampling import ResolvedSampling, SamplingParams

__all__ = [
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "ModelLimits",
    "ResolvedSampling",
    "SamplingParams",
    "TokenEvent",
]
