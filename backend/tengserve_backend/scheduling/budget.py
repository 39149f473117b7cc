"""How many tokens a step computes: as many as pay while nobody waits for the next one, fewer beside running streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of a step.

    Attributes:
        most: at most, prompts and outputs together.
        beside_streams: of prompts, in a step that also has the next token of running streams, where as many streams run
            as prompts wait or more. At most `most`.
    """

    most: int
    beside_streams: int

    def __post_init__(self) -> None:
        if not 1 <= self.beside_streams <= self.most:
            raise ValueError(f"a step must have room for prompts beside streams: {self}")

    def of_prompts(self, *, streams: int, waiting: int) -> int:
        """Tokens of prompts in the next step.

        Each of them makes the next token of every stream later, and the first token of every waiting sequence earlier.
        So the more wait for a stream that runs, the more go into a step. The rule is a function of two counts: the
        same requests in the same order make the same steps on a fast machine and on a slow one.

        Args:
            streams: sequences whose next token is due in this step.
            waiting: sequences whose first token is not, as far as they may run at once.
        """
        if streams == 0:
            return self.most
        return min(self.most - streams, max(self.beside_streams, self.beside_streams * waiting // streams))
