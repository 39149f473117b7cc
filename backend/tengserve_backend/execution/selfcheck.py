"""Does this way of running the model give the model's own answer? Asked at every load.

Some models accept our attention and then answer wrongly. So two short sequences run together, in chunks and with a
decode, and once each alone with transformers' own attention. The logits must agree; for the packed way each layer must
besides have come to our attention. Only this catches models that never call the attention registry, or that mix what
is packed.
"""

from __future__ import annotations

from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.execution.forward import ModelForward, compute
from tengserve_backend.scheduling.step import ScheduledSequence, Step

_FIRST_LENGTH, _SECOND_LENGTH, _SECOND_CHUNK = 6, 9, 4
# Share of the largest logit; a wrong way is off by about the whole of it.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_blocks(block_size: int) -> int:
    """Cache blocks that `steps` use."""
    return 2 * -(-_SECOND_LENGTH // block_size)


def check_prompts(vocab_size: int) -> tuple[list[int], list[int]]:
    """Token ids of the two sequences: random, and the same at every load."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocab_size, (_FIRST_LENGTH,), generator=generator).tolist()
    second = torch.randint(vocab_size, (_SECOND_LENGTH,), generator=generator).tolist()
    return first, second


@torch.inference_mode()
def expected_logits(model: Any, vocab_size: int, device: torch.device) -> torch.Tensor:
    """What the model answers each sequence alone, by transformers only: [3, vocabulary], in `find_fault`'s order."""
    first, second = check_prompts(vocab_size)
    alone = [
        model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0].float()
        for prompt in (first, second)
    ]
    return torch.stack([alone[0][-2], alone[0][-1], alone[1][-1]])


@torch.inference_mode()
def find_fault(
    forward: ModelForward, expected: torch.Tensor, device: DeviceBackend, *, vocab_size: int, dtype: torch.dtype
) -> str | None:
    """Whether `check_logits` agree with others; one clause that says what is wrong, or None.

    Args:
        forward: over at least `check_blocks` blocks.
        expected: of `expected_logits`.
        device: the forward's.
        dtype: that the model computes in.

    Raises:
        Exception: what says that the device is lost, for then no other way would work either.
    """
    try:
        got = check_logits(forward, device, vocab_size=vocab_size)
    except Exception as error:  # what foreign model code raises here only means "not this way"
        if device.is_fault(error):
            raise
        return f"it fails with {type(error).__name__}"
    if got.shape != expected.shape:
        return "it does not give the logits of chosen positions"
    share = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not share <= _TOLERANCE[dtype]:
        return f"its logits differ from those of each sequence alone by {share:.1%} of the largest"
    return None


@torch.inference_mode()
def check_logits(forward: ModelForward, device: DeviceBackend, *, vocab_size: int) -> torch.Tensor:
    """What a forward answers the two sequences together: [3, vocabulary], in `expected_logits`' order.

    Raises:
        Exception: whatever it raises.
    """
    first, second = check_prompts(vocab_size)
    blocks = check_blocks(forward.block_size) // 2
    table_first, table_second = tuple(range(blocks)), tuple(range(blocks, 2 * blocks))
    prefill = Step(
        0,
        (
            ScheduledSequence(0, 0, tuple(first[:-1]), table_first, samples=True),
            ScheduledSequence(1, 0, tuple(second[:_SECOND_CHUNK]), table_second, samples=False),
        ),
    )
    mixed = Step(
        1,
        (
            ScheduledSequence(0, _FIRST_LENGTH - 1, tuple(first[-1:]), table_first, samples=True),
            ScheduledSequence(1, _SECOND_CHUNK, tuple(second[_SECOND_CHUNK:]), table_second, samples=True),
        ),
    )
    try:
        return torch.cat([compute(forward, step, device.upload).last.float() for step in (prefill, mixed)])
    finally:
        forward.release(0)
        forward.release(1)
