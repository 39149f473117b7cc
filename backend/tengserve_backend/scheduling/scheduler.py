"""The one rule of scheduling: in each step, let tokens computed catch up with tokens known.

There is no prefill phase and no decode phase. A step has a budget of tokens. Sequences that need one token (they
decode) are served first, so a long prompt never stops a running stream; then running prompts get their next chunk; then
waiting sequences start while there is room (scheduling/budget.py). A preempted sequence is one whose computed count
went back to 0: it is computed again like a prompt, and its output does not show it.

A sequence that begins like an earlier one starts with the blocks that are still known and has fewer tokens to
compute. Other blocks are taken as tokens need them. When none is left, the sequence of the lowest rank (lowest
priority, newest) gives its own back and waits. The sequence of the highest rank can always go on, so there is always
progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.queue import WaitingQueue
from tengserve_backend.scheduling.sequence import Sequence
from tengserve_backend.scheduling.step import ScheduledSequence, Step


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold.

    Attributes:
        tokens: of a step; at least max_running, so that every decode fits.
        max_running: sequences that hold blocks.
    """

    tokens: StepTokens
    max_running: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.tokens.most:
            raise ValueError(f"a step must have room for one token of each running sequence: {self}")


class Scheduler:
    """Owns the sequences and their blocks. One thread calls it.

    ```
    add -> waiting --schedule--> running --remove--> gone
              ^                     |
              +------ preempt ------+
    ```
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, prefixes: PrefixSharing) -> None:
        self._limits = limits
        self._pool = pool
        self._prefixes = prefixes
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}
        self._preempted: list[int] = []
        self._steps = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    @property
    def steps(self) -> int:
        """Steps made so far."""
        return self._steps

    @property
    def has_work(self) -> bool:
        """Whether a step can be made."""
        return bool(self._running) or bool(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that can fit: the pool holds its prompt and everything that it may generate."""
        self._waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state; its blocks are free at once."""
        if self._running.pop(sequence.seq_id, None) is None:
            self._waiting.remove(sequence)
        self._release(sequence)
        self._prefixes.forget(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do."""
        parts: dict[int, ScheduledSequence] = {}
        by_rank = sorted(self._running.values(), key=lambda sequence: sequence.rank)
        decoding = [sequence for sequence in by_rank if sequence.pending == 1]
        prefilling = [sequence for sequence in by_rank if sequence.pending > 1]
        for sequence in decoding:
            if sequence.seq_id in self._running and self._grow(sequence, 1, parts):
                self._put(sequence, 1, parts)
        startable = min(len(self._waiting), self._limits.max_running - len(self._running))
        budget = self._limits.tokens.of_prompts(streams=len(parts), waiting=len(prefilling) + startable)
        for sequence in prefilling:
            count = min(sequence.pending, budget)
            if count and sequence.seq_id in self._running and self._grow(sequence, count, parts):
                budget -= self._put(sequence, count, parts)
        while budget and len(self._running) < self._limits.max_running:
            admitted = self._admit()
            if admitted is None:
                break
            count = min(admitted.pending, budget)
            budget -= self._put(admitted, count, parts)
        if not parts:
            return None
        step = Step(self._steps, tuple(parts.values()), tuple(self._preempted))
        self._preempted.clear()
        self._steps += 1
        return step

    def apply(self, step: Step, tokens: Mapping[int, int]) -> None:
        """Take a step's result: the computed tokens count, and each sampled token is known from now on.

        Args:
            step: what `schedule` returned, with no other call to `schedule` in between.
            tokens: the sampled token id of each sequence whose part samples. Sequences removed since are skipped.
        """
        for part in step.sequences:
            sequence = self._running.get(part.seq_id)
            if sequence is None:
                continue
            sequence.computed += len(part.token_ids)
            self._prefixes.publish(sequence)
            if part.samples:
                sequence.token_ids.append(tokens[part.seq_id])

    def shed(self, step: Step) -> Step:
        """Preempt the lower half of the sequences of a step that has not been applied; the step that is left."""
        members = sorted((self._running[part.seq_id] for part in step.sequences), key=lambda member: member.rank)
        dropped = members[-(len(members) // 2) :] if len(members) > 1 else []
        for member in dropped:
            self._preempt(member)
        return step.without({member.seq_id for member in dropped})

    def check(self) -> None:
        """Prove that no block is lost or shared.

        Raises:
            RuntimeError: one is.
        """
        self._pool.check(block for sequence in self._running.values() for block in sequence.blocks)

    def _put(self, sequence: Sequence, count: int, parts: dict[int, ScheduledSequence]) -> int:
        end = sequence.computed + count
        parts[sequence.seq_id] = ScheduledSequence(
            seq_id=sequence.seq_id,
            start=sequence.computed,
            token_ids=tuple(sequence.token_ids[sequence.computed : end]),
            blocks=tuple(sequence.blocks[: self._pool.blocks_for(end)]),
            samples=end == len(sequence.token_ids),
            scores_prompt=sequence.scores_prompt,
        )
        return count

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence when all its known tokens fit; it never jumps the queue."""
        sequence = self._waiting.peek()
        if sequence is None:
            return None
        found = self._prefixes.find(sequence)
        needed = self._pool.blocks_for(len(sequence.token_ids)) - len(found)
        if needed + self._pool.cached_among(found) > self._pool.available:
            return None
        self._waiting.remove(sequence)
        self._pool.share(found)
        sequence.blocks = found + self._pool.allocate(needed)
        sequence.computed = len(found) * self._pool.block_size
        self._running[sequence.seq_id] = sequence
        self._prefixes.started(sequence)
        return sequence

    def _grow(self, sequence: Sequence, count: int, parts: Mapping[int, ScheduledSequence]) -> bool:
        """Make the blocks cover `count` more tokens, preempting sequences of lower rank; False when that failed."""
        missing = self._pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        while missing > self._pool.available:
            victim = max(self._running.values(), key=lambda member: member.rank)
            if victim.seq_id in parts:
                return False  # everything of lower rank has its part in this step already: wait for the next one
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self._pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._release(sequence)
        sequence.computed = 0
        self._waiting.push(sequence)
        self._preempted.append(sequence.seq_id)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
