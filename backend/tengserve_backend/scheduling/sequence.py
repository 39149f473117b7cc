"""A request as the scheduler sees it: integers."""

from __future__ import annotations

from dataclasses import dataclass, field

AGING_ARRIVALS = 64
"""A level of priority is worth this many later arrivals: what waits longer is served before what is more urgent."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known and tokens computed; a step lets the second catch up with the first.

    ```
    token_ids   [ prompt ............ | output ... ]      len = known
    computed    [ in the KV cache .......]                <= known
    blocks      [ b0 | b1 | b2 | b3 ]                     cover at least `computed` tokens
    ```

    Attributes:
        seq_id: unique in its engine.
        priority: 1 (first) to 5.
        arrival: counts up; orders sequences of the same priority, and is kept through preemption.
        prompt_len: leading token ids that are the prompt.
        token_ids: prompt and output.
        computed: leading tokens whose keys and values are in the cache.
        blocks: cache blocks, in order, owned by this sequence.
        prompt_logprobs: the request asks how probable its prompt is.
    """

    seq_id: int
    priority: int
    arrival: int
    prompt_len: int
    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt_logprobs: bool = False

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.token_ids) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether every token's logits are wanted now: that needs each of them computed, and ends with the prompt."""
        return self.prompt_logprobs and len(self.token_ids) == self.prompt_len

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service, the smaller first: by priority, then first come first served.

        Ageing is part of it, so that nobody waits for ever: at most AGING_ARRIVALS later requests of each higher level
        come before a request. The order of two sequences never changes, so nothing has to be sorted again.
        """
        return self.arrival + self.priority * AGING_ARRIVALS, self.arrival
