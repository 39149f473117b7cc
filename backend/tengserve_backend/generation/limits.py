"""What one model can take, and the rules that follow."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_TOKENS = 1024 * 1024
"""No prompt is longer, whatever the model (MindIE native API, /infer: inputs, "1MB")."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Token limits of a loaded model.

    Attributes:
        max_seq_len: prompt and output together (maxSeqLen).
        max_input_len: the operator's prompt limit (maxInputTokenLen).
        max_iter_times: the operator's output limit (maxIterTimes).
        max_position_embeddings: positions that the model was built for; None when it has no such limit.
    """

    max_seq_len: int
    max_input_len: int
    max_iter_times: int
    max_position_embeddings: int | None = None

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt: the minimum that MindIE's native API gives, /infer: inputs."""
        limits = [self.max_input_len, self.max_seq_len - 1, MAX_PROMPT_TOKENS]
        if self.max_position_embeddings is not None:
            limits.append(self.max_position_embeddings)
        return min(limits)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence. Its last token is never fed back, so it needs no position of its own."""
        if self.max_position_embeddings is None:
            return self.max_seq_len
        return min(self.max_seq_len, self.max_position_embeddings + 1)

    def max_output_tokens(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Tokens that a request may generate: min(max_new_tokens, maxIterTimes, room left), at least 1."""
        return max(1, min(max_new_tokens, self.max_iter_times, self.max_sequence_tokens - prompt_tokens))
