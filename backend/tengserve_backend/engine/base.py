"""What the adapter sees of an engine. A distributed engine behind HTTP would implement the same protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from tengserve_backend.engine.statistics import Statistics
from tengserve_backend.generation import GenerationRequest, ModelLimits, TokenEvent


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as far as a dialect or an operator needs to know it.

    Attributes:
        name, version: as in the model repository.
        architecture: the class name of the transformers model.
        vocab_size: token ids are in [0, vocab_size).
        limits: token limits.
        full_text_enabled: MindIE's fullTextEnabled: streams repeat the whole text so far.
        device, dtype, attention_tier: what the model runs on now, for logs and metrics.
        fused: names of the fusions that replaced parts of it.
        quantization: how its linear layers keep their weights, as the setting says it.
    """

    name: str
    version: str
    architecture: str
    vocab_size: int
    limits: ModelLimits
    full_text_enabled: bool
    device: str
    dtype: str
    attention_tier: str
    fused: tuple[str, ...] = ()
    quantization: str = "none"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine, cheap to take from any thread.

    Attributes:
        alive: the loop runs and the device answers; False is for ever.
        failure: one sentence when not alive.
        device_lost: it is not alive because its device failed: nothing in this process can use that device any more.
        waiting_requests, waiting_tokens: admitted, and not started.
        running_requests: holding cache blocks.
        seconds_since_step: since the loop last finished a step, while it has work; 0.0 when idle.
        total_blocks, free_blocks, cached_blocks: of the KV cache; a cached block is idle and still known by content.
        block_size: tokens a block holds.
        steps, preemptions: counted since the start.
        prefix_asked_tokens, prefix_hit_tokens: tokens of sequences that started, and those they found computed.
        statistics: what was done since the start.
    """

    alive: bool
    failure: str | None
    device_lost: bool
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    seconds_since_step: float
    total_blocks: int
    free_blocks: int
    block_size: int
    cached_blocks: int
    steps: int
    preemptions: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    statistics: Statistics


Tap = Callable[[TokenEvent], bool]
"""Takes an event, or gives it back by False."""


class Generation(Protocol):
    """A submitted request: an asynchronous iterator of its events.

    Iterating ends after the event with `finish`, or raises one error of `tengserve_backend.errors`. Whoever submits
    owns it: call `abort` when the answer is no longer wanted (it is harmless after the end). The request then ends
    within one step, in every state.
    """

    @property
    def request_id(self) -> str:
        """The request's id."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    async def __anext__(self) -> TokenEvent: ...

    def tap(self, tap: Tap) -> None:
        """Offer a shorter way than iterating, which wakes a task for each event.

        While the iterator is waited for, an event may go to `tap` at once, in the event loop, and only one that it
        does not take comes out of the iterator. The order stays, and the last event always comes out of the iterator;
        so does what `tap` raises. An implementation may do without.
        """
        ...

    def abort(self) -> None:
        """Stop generating; later reads raise RequestAbortedError."""
        ...


class Engine(Protocol):
    """One loaded model."""

    @property
    def info(self) -> ModelInfo:
        """The model."""
        ...

    async def submit(self, request: GenerationRequest) -> Generation:
        """Check the request against the model and queue it. Returns at once; events follow.

        Raises:
            InvalidRequestError: the prompt has no tokens; or logit_bias, logprobs or prompt_logprobs ask for too much.
            PromptTooLongError, InvalidTokenIdError: the prompt, or logit_bias, does not fit the model.
            OverloadedError: a queue is full.
            ShuttingDownError: the engine drains or has stopped.
            EngineFailedError: the engine is dead.
        """
        ...

    def status(self) -> EngineStatus:
        """The engine now."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and wait for what runs; False when the time ran out first.

        May be awaited on any event loop, also on another than the requests'.
        """
        ...

    def stop(self) -> None:
        """End every request with RequestAbortedError, end the loop, give the memory back. Blocks until done."""
        ...
