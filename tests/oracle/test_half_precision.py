"""bfloat16: packed, chunked and batched logits against one sequence alone, in bfloat16 and in float32.

A bfloat16 number has 8 significant bits, so one rounding is off by 0.4 % at most; through four layers that adds up to a
percent or two. The bound is 5 % of the largest logit, an eighth of what a mistake in pages, positions or masks makes.
"""

from __future__ import annotations

import pytest
import torch

from support.architectures import VOCAB_SIZE, build_model
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.execution.forward import compute
from tengserve_backend.scheduling.step import ScheduledSequence, Step

BOUND = 0.05


def steps(prompts: list[list[int]], block_size: int) -> list[Step]:
    """All prompts side by side in chunks of 7 tokens, blocks dealt out in turn; the last token of each samples."""
    blocks = [tuple(range(index, 64, len(prompts))) for index in range(len(prompts))]
    longest = max(map(len, prompts))
    made = []
    for start in range(0, longest, 7):
        parts = [
            ScheduledSequence(
                seq_id=index,
                start=start,
                token_ids=tuple(prompt[start : start + 7]),
                blocks=blocks[index][: -(-len(prompt) // block_size)],
                samples=start + 7 >= len(prompt),
            )
            for index, prompt in enumerate(prompts)
            if start < len(prompt)
        ]
        made.append(Step(start, tuple(parts)))
    return made


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.inference_mode()
def test_logits_are_within_the_bound(name, device):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in (33, 40, 5)]
    exact = build_model(name)
    half = build_model(name).to(torch.bfloat16)

    def alone(model) -> torch.Tensor:
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1].float() for ids in prompts])

    in_float32, in_bfloat16 = alone(exact), alone(half)
    device.fuse(half, ())
    choice = choose_forward(half, device, vocab_size=VOCAB_SIZE, dtype=torch.bfloat16)
    assert choice.packed, choice.reason
    forward = build_forward(choice, half, total_blocks=64, device=device, dtype=torch.bfloat16)
    got: dict[int, torch.Tensor] = {}
    for step in steps(prompts, choice.block_size):
        sampled = [part.seq_id for part in step.sequences if part.samples]
        got.update(zip(sampled, compute(forward, step, device.upload).last.float(), strict=True))
    packed = torch.stack([got[index] for index in range(len(prompts))])
    largest = in_float32.abs().max()
    assert (packed - in_bfloat16).abs().max() / largest < BOUND
    assert (packed - in_float32).abs().max() / largest < BOUND
    # The bound means something: another prompt's logits are far outside it.
    assert (packed[0] - packed[1]).abs().max() / largest > 8 * BOUND
