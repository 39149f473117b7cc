"""What only the model can tell about a request; the dialect has checked everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.errors import InvalidRequestError, InvalidTokenIdError, PromptTooLongError
from tengserve_backend.generation import MAX_LOGIT_BIASES, MAX_LOGPROBS, GenerationRequest
from tengserve_backend.kvcache.block_pool import BlockPool


class RequestChecks:
    """The checks of one model; each raises or does nothing.

    Args:
        info: the model.
        pool: its cache blocks.
    """

    def __init__(self, info: ModelInfo, pool: BlockPool) -> None:
        self._info = info
        self._pool = pool

    def sampling(self, request: GenerationRequest) -> None:
        """Fields that name tokens, and what must be bounded whoever asks.

        Raises:
            InvalidRequestError, InvalidTokenIdError: naming the field.
        """
        biases = request.sampling.logit_bias
        if len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}.", field="logit_bias"
            )
        vocab_size = self._info.vocab_size
        for token_id, bias in biases:
            if not 0 <= token_id < vocab_size:
                raise InvalidTokenIdError(
                    f"Token id {token_id} in logit_bias is outside the vocabulary of {vocab_size} tokens.",
                    field="logit_bias",
                )
            if not math.isfinite(bias):
                raise InvalidRequestError(
                    f"The logit_bias of token id {token_id} must be finite, got {bias}.", field="logit_bias"
                )
        for field, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequestError(f"{field} must be from 0 to {MAX_LOGPROBS}, got {value}.", field=field)

    def prompt_length(self, request: GenerationRequest, tokens: int, *, at_least: bool = False) -> None:
        """The model's limits, and the dialect's.

        Args:
            tokens: of the prompt.
            at_least: it has these tokens or more, and nobody has counted.

        Raises:
            PromptTooLongError: over the limit.
        """
        limit = self._info.limits.max_prompt_tokens
        if request.max_prompt_tokens is not None:
            limit = min(limit, request.max_prompt_tokens)
        if tokens > limit:
            raise PromptTooLongError(
                f"This model's maximum input ids length cannot be greater than {limit}, "
                f"the input ids length is {'at least ' if at_least else ''}{tokens}",
                field="prompt",
            )

    def prompt(self, request: GenerationRequest, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """The prompt as token ids.

        Args:
            max_tokens: that may be generated.

        Raises:
            InvalidRequestError: it is empty.
            PromptTooLongError: over a limit, or the cache could never hold it and its answer.
            InvalidTokenIdError: an id outside the vocabulary.
        """
        if not prompt_ids:
            raise InvalidRequestError("The prompt must have at least one token, got none.", field="prompt")
        self.prompt_length(request, len(prompt_ids))
        vocab_size = self._info.vocab_size
        for index, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidTokenIdError(
                    f"Token id {token_id} at index {index} is outside the vocabulary of {vocab_size} tokens.",
                    field="prompt",
                )
        needed = self._pool.blocks_for(len(prompt_ids) + max_tokens)
        if needed > self._pool.total:
            raise PromptTooLongError(
                f"The prompt of {len(prompt_ids)} tokens and its answer need {needed} blocks of the KV cache, "
                f"which has {self._pool.total}: ask for a shorter answer, or raise the model's kvCacheMemory.",
                field="prompt",
            )
