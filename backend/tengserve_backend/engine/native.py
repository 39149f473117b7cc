"""The native engine: the embedded default behind the Engine protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tengserve_backend.engine.answer import Answer
from tengserve_backend.engine.base import EngineStatus, ModelInfo
from tengserve_backend.engine.checks import RequestChecks
from tengserve_backend.engine.handle import GenerationHandle
from tengserve_backend.engine.loop import EngineLoop, Job
from tengserve_backend.errors import (
    DeadlineExceededError,
    EngineFailedError,
)
from tengserve_backend.execution.changeover import Changed
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.scheduling.admission import Admission
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.scheduler import Scheduler
from tengserve_backend.scheduling.sequence import Sequence as ScheduledSequence
from tengserve_backend.text.tokenizer import Tokenizer

# Tokenizing this much takes well under a millisecond; longer texts go to a thread.
_INLINE_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What the model's own files say about generation.

    Attributes:
        top_k: for requests that sample and do not say; 0 is no limit.
        eos_ids: tokens that end an answer.
    """

    top_k: int
    eos_ids: frozenset[int]


class NativeEngine:
    """See engine.base.Engine.

    Args:
        info: the model.
        defaults: the model's own generation defaults.
        tokenizer: safe to call from several threads.
        loop, scheduler, pool, prefixes, admission: the parts that it joins; it starts and stops the loop.
        release: called once the loop has ended, to give the model's memory back.
        now: the loop's clock.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        defaults: ModelDefaults,
        tokenizer: Tokenizer,
        loop: EngineLoop,
        scheduler: Scheduler,
        pool: BlockPool,
        prefixes: PrefixSharing,
        admission: Admission,
        release: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._info = info
        self._checks = RequestChecks(info, pool)
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._loop = loop
        self._scheduler = scheduler
        self._pool = pool
        self._prefixes = prefixes
        self._admission = admission
        self._release = release
        self._now = now
        self._counter = itertools.count()
        # One thread: a second would only take the core that the model computes on.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"tokenize-{info.name}")
        loop.start()

    @property
    def info(self) -> ModelInfo:
        """See Engine."""
        return self._info

    async def submit(self, request: GenerationRequest) -> GenerationHandle:
        """See Engine."""
        if not self._loop.alive and self._loop.failure is not None:
            raise EngineFailedError(self._loop.failure)
        submitted = self._now()
        self._checks.sampling(request)
        self._admission.enter()
        try:
            prompt_ids = await self._prompt_ids(request)
            self._checks.prompt(request, prompt_ids, self._max_tokens(request, len(prompt_ids)))
            self._admission.add_waiting_tokens(len(prompt_ids))
            try:
                job = self._job(request, prompt_ids, submitted)
                self._loop.submit(job)
            except BaseException:
                self._admission.start(len(prompt_ids))
                raise
        except BaseException:
            self._admission.leave()
            raise
        return job.handle

    def status(self) -> EngineStatus:
        """See Engine."""
        return EngineStatus(
            alive=self._loop.alive,
            failure=self._loop.failure,
            device_lost=self._loop.device_lost,
            waiting_requests=max(0, self._admission.requests - self._scheduler.running),
            waiting_tokens=self._admission.waiting_tokens,
            running_requests=self._scheduler.running,
            seconds_since_step=self._loop.seconds_since_step,
            total_blocks=self._pool.total,
            free_blocks=self._pool.free,
            cached_blocks=self._pool.cached,
            block_size=self._pool.block_size,
            steps=self._scheduler.steps,
            preemptions=self._scheduler.preemptions,
            prefix_asked_tokens=self._prefixes.asked_tokens,
            prefix_hit_tokens=self._prefixes.hit_tokens,
            statistics=self._loop.statistics.snapshot(),
        )

    def interleave(self, work: Callable[[Callable[[], Sequence[int]]], Generator[None, None, Changed]]) -> None:
        """Change how the model runs while it serves, from any thread; harmless when the engine has ended.

        Args:
            work: given a function that tells which cache blocks hold something, does a part at each turn, on the
                engine's thread between two steps; returns how the model runs from then on.
        """

        def noted() -> Iterator[None]:
            changed = yield from work(self._pool.holding)
            self._info = dataclasses.replace(self._info, attention_tier=changed.attention_tier, fused=changed.fused)

        self._loop.interleave(noted())

    async def drain(self, timeout_s: float) -> bool:
        """See Engine."""
        self._admission.close()
        return await asyncio.to_thread(self._admission.wait_empty, timeout_s)

    def stop(self) -> None:
        """See Engine."""
        self._admission.close()
        self._loop.stop()
        self._tokenizing.shutdown(wait=True, cancel_futures=True)
        if not self._loop.device_lost:  # A lost device might never answer.
            self._release()

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        if len(request.prompt) <= _INLINE_CHARACTERS:
            return self._tokenizer.encode(request.prompt)
        # A text that is surely too long is refused before it takes the tokenizer's time.
        self._checks.prompt_length(request, self._tokenizer.fewest_tokens(request.prompt), at_least=True)
        running = asyncio.get_running_loop()
        encoding = running.run_in_executor(self._tokenizing, self._tokenizer.encode, request.prompt)
        try:
            return await asyncio.wait_for(encoding, request.timeout_s)
        except TimeoutError:
            raise DeadlineExceededError("The request did not finish within its timeout.") from None

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        return self._info.limits.max_output_tokens(prompt_tokens, request.max_new_tokens)

    def _job(self, request: GenerationRequest, prompt_ids: list[int], submitted: float) -> Job:
        seq_id = next(self._counter)
        max_tokens = self._max_tokens(request, len(prompt_ids))

        def decode(token_ids: Sequence[int]) -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)

        return Job(
            sequence=ScheduledSequence(
                seq_id=seq_id,
                priority=request.priority,
                arrival=seq_id,
                prompt_len=len(prompt_ids),
                token_ids=prompt_ids,
                prompt_logprobs=request.prompt_logprobs is not None,
            ),
            handle=GenerationHandle(
                request.request_id,
                len(prompt_ids),
                asyncio.get_running_loop(),
                lambda: self._loop.abort(seq_id),
            ),
            answer=Answer(request, decode=decode, eos_ids=self._defaults.eos_ids, max_tokens=max_tokens),
            sampling=request.sampling.resolve(
                default_top_k=self._defaults.top_k,
                vocab_size=self._info.vocab_size,
                drawn_seed=secrets.randbelow(2**32 - 1) + 1,
            ),
            min_new_tokens=min(request.min_new_tokens, max_tokens),
            submitted=submitted,
            deadline=submitted + request.timeout_s,
            last_token=submitted,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
