"""The quick-start model without a server around it: the scheduler's steps, run one after another in one thread."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _bench_process  # noqa: F401 - before torch, which the others import

from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.devices.cpu_threads import threads_for
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.execution.loader import DTYPES, load_config, load_model, vocabulary_size
from tengserve_backend.execution.runner import Runner
from tengserve_backend.generation import SamplingParams
from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.native.load import cpu_library
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.scheduler import Scheduler, SchedulerLimits
from tengserve_backend.scheduling.sequence import Sequence as Request
from tengserve_backend.scheduling.step import ScheduledSequence, Step


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that arrive together and run to their end.

    Attributes:
        prompts: token ids of each.
        output: tokens of each answer.
    """

    prompts: Sequence[list[int]]
    output: int


class BareEngine:
    """The model, its pages, and nothing else.

    Args:
        weights: a folder of Hugging Face files.
        tokens: that the pages hold.
        running: sequences at once.
        dtype: as the setting.
    """

    def __init__(self, weights: Path, *, tokens: int, running: int, dtype: str = "auto") -> None:
        threads = threads_for(None, None)
        threads.bind()
        library = cpu_library()
        library.result()
        device = CpuDevice(library, threads)
        config = load_config(weights, trust_remote_code=False)
        torch_dtype = device.default_dtype(config.dtype) if dtype == "auto" else DTYPES[dtype]
        model = load_model(weights, config, dtype=torch_dtype, device=device.torch_device, trust_remote_code=False)
        self.vocabulary = vocabulary_size(model, config.get_text_config())
        device.fuse(model, ())
        choice = choose_forward(model, device, vocab_size=self.vocabulary, dtype=torch_dtype)
        self.block_size = choice.block_size
        self.blocks = -(-tokens // self.block_size) + running
        forward = build_forward(choice, model, total_blocks=self.blocks, device=device, dtype=torch_dtype)
        self.description = f"{str(torch_dtype).removeprefix('torch.')}, {threads}, attention {forward.tier}"
        self.running = running
        self.step_tokens = device.default_step_tokens()
        self._runner = Runner(forward=forward, device=device, eos_ids=())
        self._greedy = SamplingParams(do_sample=False).resolve(
            default_top_k=0, vocab_size=self.vocabulary, drawn_seed=1
        )
        self._numbers = itertools.count()
        # What lives now lives as long as the process: no pause while steps are measured.
        gc.collect()
        gc.freeze()

    def scheduler(self) -> Scheduler:
        """A scheduler with the server's default limits over all pages."""
        limits = SchedulerLimits(
            StepTokens(max(self.step_tokens.most, self.running), self.step_tokens.beside_streams), self.running
        )
        pool = BlockPool(self.blocks, self.block_size)
        return Scheduler(limits, pool, PrefixSharing(pool, enabled=True))

    def request(self, prompt: list[int]) -> Request:
        """A request that the runner knows."""
        number = next(self._numbers)
        self._runner.admit(number, prompt_ids=prompt, sampling=self._greedy, min_new_tokens=0)
        return Request(number, 5, number, len(prompt), list(prompt))

    def run_step(self, scheduler: Scheduler) -> Step:
        """The scheduler's next step, run and applied."""
        step = scheduler.schedule()
        assert step is not None
        tokens = self._runner.run(step)
        scheduler.apply(step, {number: token.token_id for number, token in tokens.items() if token is not None})
        return step

    def end(self, scheduler: Scheduler, request: Request) -> None:
        """Forget a request."""
        scheduler.remove(request)
        self._runner.release(request.seq_id)

    def wave_s(self, wave: Wave) -> float:
        """Seconds that the steps of a wave take, from its arrival to its last token."""
        scheduler = self.scheduler()
        live = {request.seq_id: request for request in map(self.request, wave.prompts)}
        began = time.perf_counter()
        for request in live.values():
            scheduler.add(request)
        while live:
            for part in self.run_step(scheduler).sequences:
                request = live[part.seq_id]
                if len(request.token_ids) - request.prompt_len == wave.output:
                    self.end(scheduler, live.pop(part.seq_id))
        return time.perf_counter() - began

    def step_s(self, sequences: int, context: int, *, tokens: int = 1) -> float:
        """Seconds of one step: each of some sequences computes its last tokens, the ones before being in the pages.

        Args:
            sequences: how many.
            context: tokens of each after the step.
            tokens: that each computes.
        """
        blocks = -(-context // self.block_size)
        requests = [self.request([1]) for _ in range(sequences)]
        parts = tuple(
            ScheduledSequence(
                seq_id=request.seq_id,
                start=context - tokens,
                token_ids=tuple(100 + position % 1000 for position in range(tokens)),
                blocks=tuple(range(index * blocks, (index + 1) * blocks)),
                samples=True,
            )
            for index, request in enumerate(requests)
        )
        began = time.perf_counter()
        self._runner.run(Step(0, parts))
        seconds = time.perf_counter() - began
        for request in requests:
            self._runner.release(request.seq_id)
        return seconds
