"""What the model itself found probable: log probabilities of its logits as they are, before any rule of sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tengserve_backend.generation.events import LOGPROB_FLOOR, TokenLogprobs

# Bounds the float32 copies when a long prompt is asked about.
_ROWS_AT_ONCE = 64


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log probabilities of one token a row.

    Args:
        logits: [R, vocabulary], any float dtype. What is not finite in them comes out as LOGPROB_FLOOR.
        token_ids: R tokens.
        top: how many of the most probable tokens to report besides.
    """
    results: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        ids = token_ids[first : first + _ROWS_AT_ONCE]
        results += _of_rows(logits[first : first + len(ids)], ids, top)
    return results


def _of_rows(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    scores = torch.log_softmax(logits.to(torch.float32), dim=-1)
    scores = scores.nan_to_num_(nan=LOGPROB_FLOOR, posinf=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (scores > chosen).sum(dim=-1, keepdim=True) + 1
    best = scores.topk(min(top, scores.shape[1]), dim=-1)
    # One read: ids and ranks are below 2**24, so float32 holds them.
    found = torch.cat([chosen, ranks, best.indices, best.values], dim=-1).tolist()
    count = best.values.shape[1]
    return [
        TokenLogprobs(token_id, logprob, int(rank), tuple(zip(map(int, numbers[:count]), numbers[count:], strict=True)))
        for token_id, (logprob, rank, *numbers) in zip(token_ids, found, strict=True)
    ]


class PromptScores:
    """How probable the tokens of one prompt are, gathered as its chunks are computed.

    Args:
        prompt_ids: the prompt.
        top: how many of the most probable tokens to report at each position.
    """

    def __init__(self, prompt_ids: Sequence[int], top: int) -> None:
        self._prompt_ids = prompt_ids
        self._top = top
        # Nothing comes before the first token.
        self._scores: list[TokenLogprobs | None] = [None]

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Take the logits [rows, vocabulary] of the tokens from a position on, each of which scores the next token.

        Tokens that were scored before are skipped, so a chunk may come again.
        """
        scored = len(self._scores)
        if start >= scored:
            raise ValueError(f"the logits of positions {scored - 1} to {start - 1} are missing")
        targets = self._prompt_ids[scored : start + len(logits) + 1]
        first = scored - 1 - start
        self._scores += token_logprobs(logits[first : first + len(targets)], targets, self._top)

    def result(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry a token of the prompt, None for the first."""
        return tuple(self._scores)
