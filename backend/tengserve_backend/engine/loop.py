"""The engine's thread: the only code that touches scheduler, runner and device.

It lives on messages: submissions and aborts come in through a queue, outputs leave through the outbox. Each turn it
takes what came in, ends what is past its deadline, runs one step and sends the results.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.engine.answer import Answer
from tengserve_backend.engine.handle import GenerationHandle
from tengserve_backend.engine.outbox import Outbox
from tengserve_backend.engine.recovery import StepRunner, device_lost, run_step
from tengserve_backend.engine.statistics import StatisticsRecorder
from tengserve_backend.errors import (
    DeadlineExceededError,
    EngineFailedError,
    GenerationFailedError,
    RequestAbortedError,
    TengserveError,
)
from tengserve_backend.execution.step_profile import NoClock, Phase, StepClock
from tengserve_backend.generation import Finish, NextToken, ResolvedSampling, TokenEvent
from tengserve_backend.scheduling.admission import Admission
from tengserve_backend.scheduling.scheduler import Scheduler
from tengserve_backend.scheduling.sequence import Sequence

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 60.0
# Between two steps; a step takes tens of milliseconds.
_INTERLEAVED_S = 0.05


@dataclass(slots=True, eq=False)
class Job:
    """A request inside the engine.

    Attributes:
        sequence: what the scheduler sees.
        handle: where its outputs go.
        answer: its text and end.
        sampling, min_new_tokens, logprobs, prompt_logprobs: what the runner needs.
        submitted, deadline: seconds of time.monotonic().
        last_token: when the token before came; the submission before the first.
        started: its prompt does not count as waiting any more.
    """

    sequence: Sequence
    handle: GenerationHandle
    answer: Answer
    sampling: ResolvedSampling
    min_new_tokens: int
    submitted: float
    deadline: float
    last_token: float
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    started: bool = False


@dataclass(frozen=True, slots=True)
class _Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class _Abort:
    seq_id: int


@dataclass(frozen=True, slots=True)
class _Interleave:
    work: Iterator[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop:
    """One model's loop. `start` and `stop` belong to its owner; `submit` and `abort` may come from any thread.

    Args:
        name: of the model, for the thread and the log.
        scheduler, runner, device: owned by the loop's thread from `start` on.
        admission: told when a prompt starts and when a request leaves.
        now: a monotonic clock in seconds.
        clock: told how each step goes.
    """

    def __init__(
        self,
        *,
        name: str,
        scheduler: Scheduler,
        runner: StepRunner,
        device: DeviceBackend,
        admission: Admission,
        now: Callable[[], float],
        clock: StepClock | None = None,
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._admission = admission
        self._now = now
        self._clock = clock or NoClock()
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Interleave | _Stop] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._jobs: dict[int, Job] = {}
        self._interleaved: Iterator[None] | None = None
        self._stopping = False
        self._ending = threading.Lock()
        self._ended: TengserveError | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._busy_since: float | None = None
        self.failure: str | None = None
        self.device_lost = False
        self.statistics = StatisticsRecorder(self._clock.seconds)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request that admission let in.

        Raises:
            EngineFailedError, RequestAbortedError: the loop has ended, so nobody would answer.
        """
        with self._ending:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(_Submit(job))

    def abort(self, seq_id: int) -> None:
        """End a request; harmless when it has ended."""
        self._inbox.put(_Abort(seq_id))

    def interleave(self, work: Iterator[None]) -> None:
        """Do some work on the engine's thread, a little of it between any two steps.

        An error of it ends the work and goes to the log. One piece of work at a time: another one replaces it.

        Args:
            work: each turn does a part; the engine must be able to go on after any.
        """
        with self._ending:
            if self._ended is None:
                self._inbox.put(_Interleave(work))

    def stop(self) -> None:
        """End every request and the thread; returns when it has ended."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has not failed."""
        return self._thread.is_alive() and self.failure is None

    @property
    def seconds_since_step(self) -> float:
        """How long the step that runs now has taken, or 0.0 when there is nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._now() - since)

    def _run(self) -> None:
        try:
            self._device.bind_thread()
            while not self._stopping:
                self._receive()
                self._expire()
                self._outbox.send()
                self._step()
                self._advance()
        except BaseException as error:  # noqa: BLE001  # the thread's last line: whatever it was, waiters must hear of it
            self._end_all(self._failed(error))
        else:
            self._end_all(RequestAbortedError("The server stopped this model before the answer was complete."))
        finally:
            self._clock.close()

    def _failed(self, error: BaseException) -> EngineFailedError:
        """Note that the engine is dead, and why; what those who wait get."""
        if self._device.is_fault(error):
            self.device_lost = True
            failure: EngineFailedError = device_lost(self._device, self._name, error)
        else:
            failure = EngineFailedError(f"The engine of model {self._name} failed ({type(error).__name__}).")
            _log.critical("%s", failure.message, exc_info=error)
        self.failure = failure.message
        return failure

    def _receive(self) -> None:
        """Take every message; wait for one only when there is nothing to compute."""
        first = None
        if not self._scheduler.has_work and self._interleaved is None:
            self._busy_since = None
            first = self._inbox.get()
        self._clock.begin()
        if first is not None:
            self._handle(first)
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._handle(message)
        if self._scheduler.has_work:
            self._busy_since = self._now()

    def _handle(self, message: _Submit | _Abort | _Interleave | _Stop) -> None:
        if isinstance(message, _Submit):
            job = message.job
            self._jobs[job.sequence.seq_id] = job
            self._runner.admit(
                job.sequence.seq_id,
                prompt_ids=job.sequence.token_ids[: job.sequence.prompt_len],
                sampling=job.sampling,
                min_new_tokens=job.min_new_tokens,
                logprobs=job.logprobs,
                prompt_logprobs=job.prompt_logprobs,
            )
            self._scheduler.add(job.sequence)
        elif isinstance(message, _Abort):
            aborted = self._jobs.get(message.seq_id)
            if aborted is not None:
                self.statistics.aborted += 1
                self._remove(aborted)
        elif isinstance(message, _Interleave):
            self._interleaved = message.work
        else:
            self._stopping = True

    def _expire(self) -> None:
        now = self._now()
        for job in [job for job in self._jobs.values() if now >= job.deadline]:
            self._fail(job, DeadlineExceededError("The request did not finish within its timeout."))

    def _step(self) -> None:
        if self._stopping:
            return
        step = self._scheduler.schedule()
        if step is None:
            return
        self._clock.mark(Phase.SCHEDULE)
        began = self._now()
        for part in step.sequences:
            self._started(self._jobs[part.seq_id], began)
        outcome = run_step(step, runner=self._runner, scheduler=self._scheduler, device=self._device)
        for seq_id, error in outcome.failures.items():
            # Before the step is applied: what a failed sequence left in the cache must not be shared.
            self._fail(self._jobs[seq_id], error)
        self._scheduler.apply(outcome.step, {seq_id: token.token_id for seq_id, token in outcome.tokens.items()})
        self._clock.mark(Phase.SCHEDULE)
        now = self._now()
        self.statistics.step_seconds.record(now - began)
        self.statistics.step_sequences.record(len(step.sequences))
        self.statistics.step_tokens.record(step.total_tokens)
        for seq_id, token in outcome.tokens.items():
            self._progress(self._jobs[seq_id], token, now)
        self._clock.mark(Phase.DETOKENIZE)
        self._outbox.send()
        self._clock.mark(Phase.DELIVER)
        self._clock.end(len(step.sequences), step.total_tokens)

    def _advance(self) -> None:
        work = self._interleaved
        if work is None:
            return
        began = self._now()
        try:
            while self._now() - began < _INTERLEAVED_S:
                next(work)
        except StopIteration:
            self._interleaved = None
        except Exception as error:  # whatever it is, the requests can go on as before
            if self._device.is_fault(error):
                raise
            self._interleaved = None
            _log.error("work between the steps of model %s failed and is left", self._name, exc_info=error)

    def _started(self, job: Job, now: float) -> None:
        if not job.started:
            job.started = True
            self.statistics.prompt_tokens += job.sequence.prompt_len
            self.statistics.queue_seconds.record(now - job.submitted)
            self._admission.start(job.sequence.prompt_len)

    def _progress(self, job: Job, token: NextToken, now: float) -> None:
        try:
            progressed = job.answer.push(token.token_id)
        except Exception as error:  # noqa: BLE001  # a tokenizer may be foreign code; only this request needs its text
            _log.error("the text of a request could not be made", exc_info=error)
            self._fail(job, GenerationFailedError("The text of the answer could not be made."))
            return
        statistics = self.statistics
        statistics.generated_tokens += 1
        latencies = statistics.token_seconds if job.answer.generated_tokens > 1 else statistics.first_token_seconds
        latencies.record(now - job.last_token)
        finish = None
        if progressed.reason is not None:
            statistics.finish(progressed.reason)
            finish = Finish(
                reason=progressed.reason,
                prompt_tokens=job.sequence.prompt_len,
                generated_tokens=job.answer.generated_tokens,
                seed=job.sampling.seed,
            )
        latency_ms = (now - job.last_token) * 1000.0
        job.last_token = now
        event = TokenEvent(token.token_id, progressed.text, latency_ms, finish, token.logprobs, token.prompt_logprobs)
        self._outbox.put(job.handle, event)
        if finish is not None:
            self._remove(job)

    def _fail(self, job: Job, error: TengserveError) -> None:
        self.statistics.failed += 1
        self._outbox.put(job.handle, error)
        self._remove(job)

    def _remove(self, job: Job) -> None:
        seq_id = job.sequence.seq_id
        del self._jobs[seq_id]
        self._scheduler.remove(job.sequence)
        self._runner.release(seq_id)
        if not job.started:
            self._admission.start(job.sequence.prompt_len)
        self._admission.leave()
        if not self._jobs:
            self._scheduler.check()

    def _end_all(self, error: TengserveError) -> None:
        """Close the door and end everybody inside, those whose submission is still on its way too."""
        self._admission.close()
        with self._ending:
            self._ended = error
        self._busy_since = None
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, _Submit):
                self._jobs[message.job.sequence.seq_id] = message.job
        for job in self._jobs.values():
            self._outbox.put(job.handle, error)
            if not job.started:
                self._admission.start(job.sequence.prompt_len)
            self._admission.leave()
        self._jobs.clear()
        self._outbox.send()
        self._interleaved = None
        # The model and its pages go with it, whoever still holds the engine.
        del self._runner
