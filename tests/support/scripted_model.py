"""A real transformers-shaped module whose next token is looked up in a table: stops, partial characters and ends
can be tested exactly, through the whole engine.

The next token is a function of the last token, so a script is a chain of token ids. It goes through the attention
registry like any model (one head, one layer), so packing, pages and chunks are exercised too: the position of the
last token is read back from the cache, and a wrong page or mask gives another token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.assembly import Capacity, assemble
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.registry import IMPLEMENTATION
from tengserve_backend.execution.kv_tensors import PagedKVCache
from tengserve_backend.execution.packed import PackedForward
from tengserve_backend.execution.step_profile import StepClock
from tengserve_backend.generation import ModelLimits
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.scheduler import SchedulerLimits


class ByteTokenizer:
    """Ids 0..255 are bytes; further ids are words of several bytes or special tokens.

    Args:
        words: id (256 or more) to text.
        special: id (256 or more) to text that is skipped when special tokens are.
    """

    def __init__(self, words: Mapping[int, str] | None = None, special: Mapping[int, str] | None = None) -> None:
        self._words = {token: text.encode() for token, text in (words or {}).items()}
        self._special = {token: text.encode() for token, text in (special or {}).items()}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        parts = []
        for token in token_ids:
            if token in self._special:
                parts.append(b"" if skip_special_tokens else self._special[token])
            else:
                parts.append(self._words[token] if token in self._words else bytes([token]))
        return b"".join(parts).decode("utf-8", "replace")


class ScriptedModel(torch.nn.Module):
    """Gives `script(position of the next token, last token)` the one high logit.

    Args:
        script: the next token id; "position" counts from 0 at the first token of the prompt. An id outside the
            vocabulary makes logits that are not finite.
        vocab_size: width of the logits.
        before_step: called at the start of each forward with the packed input ids; may block or raise.
    """

    def __init__(
        self,
        script: Callable[[int, int], int],
        vocab_size: int,
        before_step: Callable[[Sequence[int]], None] = lambda ids: None,
    ) -> None:
        super().__init__()
        self.layer_idx = 0
        self._script = script
        self._vocab_size = vocab_size
        self._before_step = before_step

    def forward(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: Any
    ) -> Any:
        self._before_step(input_ids[0].tolist())
        ones = torch.ones((1, 1, input_ids.shape[1], 1))
        # Uniform attention over 1, 0, 0, ... (1 only at position 0) gives 1 / (number of tokens seen).
        value = (position_ids == 0).to(torch.float32).reshape(1, 1, -1, 1)
        attended, _weights = AttentionInterface()[IMPLEMENTATION](self, ones * 0, ones * 0, value, None, scaling=1.0)
        seen = attended[0, :, 0, 0]
        logits = torch.zeros((1, len(logits_to_keep), self._vocab_size))
        for row, index in enumerate(logits_to_keep.tolist()):
            next_position = round(1.0 / float(seen[index]))
            token = self._script(next_position, int(input_ids[0, index]))
            if token < self._vocab_size:
                logits[0, row, token] = 20.0
            else:
                logits[0, row] = math.nan
        return SimpleNamespace(logits=logits)


def scripted_engine(
    script: Callable[[int, int], int],
    *,
    tokenizer: ByteTokenizer | None = None,
    eos_ids: Sequence[int] = (),
    vocab_size: int = 300,
    max_seq_len: int = 512,
    max_iter_times: int = 512,
    max_batch_size: int = 8,
    max_batched_tokens: int = 64,
    total_blocks: int = 256,
    max_waiting_requests: int = 64,
    max_waiting_tokens: int = 10_000,
    before_step: Callable[[Sequence[int]], None] = lambda ids: None,
    full_text_enabled: bool = False,
    name: str = "scripted",
    device: DeviceBackend | None = None,
    clock: StepClock | None = None,
    now: Callable[[], float] = time.monotonic,
) -> NativeEngine:
    """A whole engine around a ScriptedModel; the caller stops it."""
    attention, device = PortableAttention(), device or CpuDevice()
    return assemble(
        forward=PackedForward(
            model=ScriptedModel(script, vocab_size, before_step),
            cache=PagedKVCache(
                total_blocks=total_blocks,
                block_size=attention.block_size,
                dtype=torch.float32,
                device=device.torch_device,
            ),
            attention=attention,
            logit_width=vocab_size,
            chunks={},
        ),
        info=ModelInfo(
            name=name,
            version="1",
            architecture="ScriptedModel",
            vocab_size=vocab_size,
            limits=ModelLimits(max_seq_len=max_seq_len, max_input_len=max_seq_len, max_iter_times=max_iter_times),
            full_text_enabled=full_text_enabled,
            device="cpu",
            dtype="float32",
            attention_tier=attention.name,
        ),
        defaults=ModelDefaults(top_k=0, eos_ids=frozenset(eos_ids)),
        tokenizer=tokenizer or ByteTokenizer(),
        device=device,
        capacity=Capacity(
            steps=SchedulerLimits(
                StepTokens(max_batched_tokens, beside_streams=max_batched_tokens),
                max_running=max_batch_size,
            ),
            total_blocks=total_blocks,
            max_waiting_requests=max_waiting_requests,
            max_waiting_tokens=max_waiting_tokens,
        ),
        clock=clock,
        now=now,
    )


def says(text: str, prompt_len: int, *, then: int, words: Mapping[str, int] | None = None) -> Callable[[int, int], int]:
    """A script that answers with a text byte by byte, or word by word where `words` has one, then with token `then`."""
    ids: list[int] = []
    rest = text
    while rest:
        word = next((word for word in words or {} if rest.startswith(word)), None)
        if word is None:
            ids += list(rest[0].encode())
            rest = rest[1:]
        else:
            ids.append((words or {})[word])
            rest = rest[len(word) :]
    return lambda position, last: ids[position - prompt_len] if position - prompt_len < len(ids) else then
