"""Log probabilities of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tengserve_backend.execution.sampling.logprobs import PromptScores, token_logprobs
from tengserve_backend.generation import LOGPROB_FLOOR


def test_they_are_the_log_softmax_with_rank_and_best():
    logits = torch.randn(200, 70, generator=torch.Generator().manual_seed(1))
    tokens = [(7 * n) % 70 for n in range(200)]
    expected = logits.log_softmax(-1)
    got = token_logprobs(logits, tokens, 3)
    assert len(got) == 200
    for scores, token, found in zip(expected, tokens, got, strict=True):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(scores[token]), abs=1e-6)
        assert found.rank == scores.argsort(descending=True).tolist().index(token) + 1
        values, indices = scores.topk(3)
        assert [entry[0] for entry in found.top] == indices.tolist()
        assert [entry[1] for entry in found.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_without_alternatives_only_the_token_is_told():
    (found,) = token_logprobs(torch.tensor([[0.0, math.log(3.0)]], dtype=torch.bfloat16).float(), [0], 0)
    assert (found.top, found.rank) == ((), 2)
    assert found.logprob == pytest.approx(math.log(0.25), abs=0.01)


def test_equally_probable_tokens_have_the_same_rank():
    found = token_logprobs(torch.tensor([[1.0, 2.0, 1.0, 1.0]]).repeat(4, 1), [0, 1, 2, 3], 0)
    assert [entry.rank for entry in found] == [2, 1, 2, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_that_is_not_finite_leaves(bad):
    logits = torch.tensor([[1.0, bad, 2.0], [bad, bad, bad], [1.0, 2.0, 3.0]])
    for found in token_logprobs(logits, [1, 1, 1], 3):
        assert all(math.isfinite(value) for value in (found.logprob, *(value for _, value in found.top)))
        assert found.logprob >= LOGPROB_FLOOR
    assert token_logprobs(logits, [1, 0, 0], 1)[0].logprob == LOGPROB_FLOOR


def test_more_alternatives_than_tokens_are_all_tokens():
    (found,) = token_logprobs(torch.zeros(1, 3), [1], 20)
    assert {token for token, _ in found.top} == {0, 1, 2}


def prompt_scores(prompt: list[int], logits: torch.Tensor, chunks: list[tuple[int, int]]) -> PromptScores:
    scores = PromptScores(prompt, 1)
    for start, end in chunks:
        scores.add(start, logits[start:end])
    return scores


def test_each_token_of_a_prompt_is_scored_once_however_its_chunks_come():
    prompt = [5, 3, 8, 1, 1, 9, 0, 2]
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(2))
    expected = (None, *token_logprobs(logits[:-1], prompt[1:], 1))
    for chunks in (
        [(0, 8)],
        [(0, 3), (3, 6), (6, 8)],
        [(0, 1), (1, 2), (2, 8)],
        [(0, 5), (0, 5), (5, 8)],
        [(0, 5), (5, 7), (0, 4), (4, 8)],
        [(0, 8), (0, 8)],
    ):
        assert prompt_scores(prompt, logits, chunks).result() == expected


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert prompt_scores([4], torch.zeros(1, 10), [(0, 1)]).result() == (None,)


def test_a_gap_between_chunks_is_an_error():
    with pytest.raises(ValueError, match="logits of positions 3 to 4 are missing"):
        prompt_scores([1] * 8, torch.zeros(8, 10), [(0, 3), (5, 8)])
