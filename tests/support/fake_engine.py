"""An engine that says what a test tells it to, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from support.engine_status import engine_status
from tengserve_backend.engine.base import EngineStatus, ModelInfo, Tap
from tengserve_backend.errors import ModelNotFoundError, ModelNotReadyError, RequestAbortedError
from tengserve_backend.generation import Finish, FinishReason, GenerationRequest, ModelLimits, TokenEvent
from tengserve_backend.inference import TensorModel
from tengserve_backend.inference.llm import LlmTensorModel

Step = TokenEvent | BaseException | asyncio.Event
"""What one read of a generation does: answer, raise, or wait and go on to the next step."""

LIMITS = ModelLimits(max_seq_len=2560, max_input_len=2048, max_iter_times=512)


def tokens(*texts: str, reason: FinishReason = FinishReason.LENGTH, seed: int = 846930886) -> list[TokenEvent]:
    """One event a text, the last one with the end."""
    last = len(texts) - 1
    return [
        TokenEvent(
            token_id=100 + index,
            text=text,
            latency_ms=10.5 + index,
            finish=Finish(reason, prompt_tokens=7, generated_tokens=len(texts), seed=seed) if index == last else None,
        )
        for index, text in enumerate(texts)
    ]


def model_info(
    name: str = "smollm2", version: str = "1", *, full_text_enabled: bool = False, limits: ModelLimits = LIMITS
) -> ModelInfo:
    return ModelInfo(
        name=name,
        version=version,
        architecture="FakeForCausalLM",
        vocab_size=32000,
        limits=limits,
        full_text_enabled=full_text_enabled,
        device="cpu",
        dtype="float32",
        attention_tier="none",
    )


class FakeGeneration:
    """A scripted answer. `aborted` is set by abort before the end; `reading` while a read waits at a gate."""

    def __init__(self, request: GenerationRequest, script: Sequence[Step]) -> None:
        self._request = request
        self._script = list(script)
        self._ended = False
        self.aborted = asyncio.Event()
        self.reading = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_tokens(self) -> int:
        return 7

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._script and not self._ended:
            step = self._script.pop(0)
            if isinstance(step, asyncio.Event):
                self.reading.set()
                await step.wait()
            elif isinstance(step, TokenEvent):
                self._ended = step.finish is not None
                return step
            else:
                self._ended = True
                raise step
        if self.aborted.is_set():
            raise RequestAbortedError("The request was cancelled.")
        raise StopAsyncIteration

    def tap(self, tap: Tap) -> None:
        pass

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self.aborted.set()


class FakeEngine:
    """Implements Engine. Every request is answered with the same script.

    Attributes:
        requests: every request submitted, in order.
        generations: what they were answered with.
        submit_error: raised by submit instead.
        submit_gate: submit waits for it.
        submitting: set when a submit begins.
        submit_cancelled: set when a submit was cancelled at its gate.
        submissions: what was answered, for a test to wait for.
    """

    def __init__(
        self,
        script: Sequence[Step] = (),
        *,
        info: ModelInfo | None = None,
        submit_error: BaseException | None = None,
        submit_gate: asyncio.Event | None = None,
    ) -> None:
        self.script = list(script) or tokens("Hello", " world")
        self.submit_error = submit_error
        self.submit_gate = submit_gate
        self.submitting = asyncio.Event()
        self.submit_cancelled = asyncio.Event()
        self.submissions: asyncio.Queue[FakeGeneration] = asyncio.Queue()
        self.requests: list[GenerationRequest] = []
        self.generations: list[FakeGeneration] = []
        self.failure: str | None = None
        self.seconds_since_step = 0.0
        self._info = info or model_info()

    @property
    def info(self) -> ModelInfo:
        return self._info

    async def submit(self, request: GenerationRequest) -> FakeGeneration:
        self.submitting.set()
        if self.submit_gate is not None:
            try:
                await self.submit_gate.wait()
            except asyncio.CancelledError:
                self.submit_cancelled.set()
                raise
        if self.submit_error is not None:
            raise self.submit_error
        generation = FakeGeneration(request, self.script)
        self.requests.append(request)
        self.generations.append(generation)
        self.submissions.put_nowait(generation)
        return generation

    def status(self) -> EngineStatus:
        return engine_status(failure=self.failure, seconds_since_step=self.seconds_since_step)

    async def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        for generation in self.generations:
            generation.abort()


class FakeState(enum.Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class FakeStatus:
    name: str
    version: str
    state: FakeState
    reason: str = ""


class FakeModels:
    """Implements Models over fake engines; a model given as a status or an error is not ready."""

    def __init__(
        self,
        models: Mapping[str, FakeEngine | FakeStatus],
        *,
        started: bool = True,
        tensor_models: Sequence[TensorModel] = (),
    ) -> None:
        self.models = dict(models)
        self.tensor_models = {model.name: model for model in tensor_models}
        self._started = started

    def engine(self, name: str, version: str | None = None) -> FakeEngine:
        model = self.models.get(name)
        if model is None or (version is not None and version != "1"):
            raise ModelNotFoundError("no such model")
        if isinstance(model, FakeStatus):
            raise ModelNotReadyError(f"Model {name} is {model.state.value.lower()}.")
        return model

    def tensor_model(self, name: str, version: str | None = None) -> TensorModel:
        if name in self.tensor_models and version in (None, "1"):
            return self.tensor_models[name]
        return LlmTensorModel(self.engine(name, version))

    def statuses(self) -> tuple[FakeStatus, ...]:
        return tuple(
            model if isinstance(model, FakeStatus) else _status_of(name, model) for name, model in self.models.items()
        )

    def started(self) -> bool:
        return self._started

    def default_name(self) -> str | None:
        return next(iter(self.models)) if len(self.models) == 1 else None


def _status_of(name: str, engine: FakeEngine) -> FakeStatus:
    """As ModelManager reports it: an engine that died is a model that is unavailable."""
    status = engine.status()
    if status.alive:
        return FakeStatus(name, "1", FakeState.READY)
    return FakeStatus(name, "1", FakeState.UNAVAILABLE, status.failure or "")
