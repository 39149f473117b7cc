"""The per-sequence forward: each sequence alone, with the cache that transformers makes for the model.

Slower, and right for every decoder-only model: those that never call the attention registry, that mix what is packed,
or whose rotary frequencies depend on the longest sequence of a batch. Blocks are still counted, so that memory stays
bounded, but hold nothing.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from tengserve_backend.execution.default_dtype import steady_default_dtype
from tengserve_backend.execution.forward import Computation, PromptLogits, StepLogits
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.scheduling.step import ScheduledSequence, Step

BLOCK_SIZE = 16


@dataclass(slots=True)
class _Memory:
    """One sequence.

    Attributes:
        token_ids: all that the sequence's parts have brought so far.
        cache: transformers' own; None when it was never made, or given up.
        computed: leading tokens that are in the cache.
        logits: [rows, vocabulary], of the last of these: one row, or all that were computed at once while the prompt
            is scored.
        pieces: how many tokens each forward of this sequence took.
    """

    token_ids: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None
    computed: int = 0
    logits: torch.Tensor | None = None
    pieces: list[int] = field(default_factory=list)

    def give_up_cache(self) -> None:
        self.cache, self.computed, self.logits = None, 0, None


class PerSequenceForward:
    """See ModelForward.

    Args:
        model: a transformers causal language model with an attention implementation of its own.
        device: where the model is.
        logit_width: scores that the model gives a token.
        length_dependent: the model's answer depends on the length of the piece that it computes (rotary frequencies
            that follow the longest position). Then a prompt is computed in one piece when its last chunk is due, and
            a preempted sequence in the pieces that it was computed in before.
    """

    tier = "per-sequence"
    block_size = BLOCK_SIZE

    def __init__(self, *, model: Any, device: torch.device, logit_width: int, length_dependent: bool) -> None:
        self.logit_width = logit_width
        self._model = model
        self._device = device
        self._length_dependent = length_dependent
        self._rotary = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
        self._memories: dict[int, _Memory] = {}
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_rows = "logits_to_keep" in accepted
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def prepare(self, step: Step, snapshot: Snapshot) -> Computation:
        """See ModelForward. Each sequence sends its own tokens up when its turn comes."""
        return lambda _: self._run(step)

    def release(self, seq_id: int) -> None:
        """See ModelForward."""
        self._memories.pop(seq_id, None)

    def probe_step(self) -> Step:
        """See ModelForward."""
        return Step(-1, (ScheduledSequence(seq_id=-1, start=0, token_ids=(0,), blocks=(), samples=True),))

    def _run(self, step: Step) -> StepLogits:
        for seq_id in step.preempted:
            if seq_id in self._memories:
                self._memories[seq_id].give_up_cache()
        last: list[torch.Tensor] = []
        prompts: dict[int, PromptLogits] = {}
        for part in step.sequences:
            logits = self._run_part(part)
            if logits is None:
                continue
            if part.scores_prompt:
                prompts[part.seq_id] = PromptLogits(part.start + len(part.token_ids) - len(logits), logits)
            if part.samples:
                last.append(logits[-1])
        return StepLogits(torch.stack(last) if last else torch.empty((0, 0), device=self._device), prompts)

    def _run_part(self, part: ScheduledSequence) -> torch.Tensor | None:
        """Logits [rows, vocabulary] up to the part's last token; None when the part is left for later."""
        memory = self._memories.setdefault(part.seq_id, _Memory())
        memory.token_ids[part.start :] = part.token_ids
        if self._length_dependent and not part.samples:
            return None
        try:
            self._catch_up(memory, every_row=part.scores_prompt)
        except BaseException:
            # Some layers may have taken the tokens and others not: start over at the next try.
            memory.give_up_cache()
            raise
        return memory.logits

    def _catch_up(self, memory: _Memory, *, every_row: bool) -> None:
        """Compute what is known and not in the cache."""
        if memory.cache is None:
            memory.cache = DynamicCache(config=self._model.config)
            replayed, memory.pieces = memory.pieces if self._length_dependent else [], []
        else:
            replayed = []
        while memory.computed < len(memory.token_ids):
            rest = len(memory.token_ids) - memory.computed
            count = replayed.pop(0) if replayed else rest
            end = memory.computed + count
            token_ids = memory.token_ids[memory.computed : end]
            rows = count if every_row else 1
            memory.logits = self._forward(token_ids, memory.computed, memory.cache, rows=rows)
            memory.pieces.append(count)
            memory.computed = end

    def _forward(self, token_ids: list[int], start: int, cache: DynamicCache, *, rows: int) -> torch.Tensor:
        """Logits [rows, vocabulary] of the last of these tokens."""
        for module in self._rotary:
            _forget_longest(module)
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(token_ids), device=self._device).unsqueeze(0)
        if self._takes_rows:
            arguments["logits_to_keep"] = rows
        with steady_default_dtype() if self._length_dependent else nullcontext():
            output = self._model(input_ids=torch.tensor([token_ids], device=self._device), **arguments)
        logits: torch.Tensor = output.logits[0, -rows:]
        return logits


def _forget_longest(module: Any) -> None:
    """Rotary embeddings of the "dynamic" kind remember the longest sequence they saw; a neighbour must not show."""
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_", ""), buffer)
