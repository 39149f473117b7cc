"""The one typed request that every dialect is parsed into."""

from __future__ import annotations

from dataclasses import dataclass, field

from tengserve_backend.generation.sampling import SamplingParams

LOWEST_PRIORITY = 5
DEFAULT_MAX_NEW_TOKENS = 20
DEFAULT_TIMEOUT_S = 600.0
MAX_LOGPROBS = 20
"""The most alternatives that a request gets for a token."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. The dialect has checked types and bounds; the engine checks what needs the model.

    Attributes:
        request_id: the client's id, or one that the dialect made; unique only if clients make it so.
        prompt: text (tokenized with the tokenizer's own special tokens, no chat template) or token ids, used as given.
        sampling: how tokens are chosen.
        max_new_tokens: at least 1; the model's maxIterTimes and the room left in maxSeqLen and in its positions lower
            it silently.
        min_new_tokens: no EOS token and no stop string ends the answer before this many tokens.
        stop: strings that end the answer; they are not part of it.
        ignore_eos: an EOS token does not end the answer.
        skip_special_tokens: special tokens leave no trace in the text.
        priority: 1 (first) to 5.
        timeout_s: seconds from submission after which the request ends with DeadlineExceededError.
        logprobs: report each generated token's log probability and those of so many most probable tokens, 0 to 20;
            None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt. The prompt is then computed even where it is cached.
        max_prompt_tokens: a limit of the dialect below the model's own, or None.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = LOWEST_PRIORITY
    timeout_s: float = DEFAULT_TIMEOUT_S
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_prompt_tokens: int | None = None
