"""The packed forward: all sequences of a step in one row, keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tengserve_backend.execution.attention.registry import StepContext, step_context
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.forward import Computation, PromptLogits, StepLogits
from tengserve_backend.execution.fusion.direct_forward import direct_forward
from tengserve_backend.execution.kv_tensors import PagedKVCache
from tengserve_backend.execution.packed_batch import pack
from tengserve_backend.execution.snapshot import Snapshot, Uploaded
from tengserve_backend.scheduling.step import ScheduledSequence, Step


class PackedForward:
    """See ModelForward.

    Args:
        model: a transformers causal language model whose attention is our registry function.
        cache: the pages; block numbers in steps are its own.
        attention: how to attend over them.
        logit_width: scores that the model gives a token.
        chunks: attention chunk size by layer, for the layers that have one.
    """

    def __init__(
        self,
        *,
        model: Any,
        cache: PagedKVCache,
        attention: AttentionTier,
        logit_width: int,
        chunks: dict[int, int],
    ) -> None:
        self._model = model
        self.cache = cache
        self._attention = attention
        self._chunks = chunks
        self.logit_width = logit_width

    @property
    def tier(self) -> str:
        """See ModelForward."""
        return self._attention.name

    @property
    def block_size(self) -> int:
        """See ModelForward."""
        return self._attention.block_size

    def prepare(self, step: Step, snapshot: Snapshot) -> Computation:
        """See ModelForward. Writing the same tokens to the same slots again changes nothing."""
        layout = pack(step, snapshot, block_size=self.block_size)

        def compute(uploaded: Uploaded) -> StepLogits:
            batch = layout.on(uploaded)
            context = StepContext(batch=batch, cache=self.cache, tier=self._attention, chunks=self._chunks)
            direct = direct_forward(self._model)
            if direct is not None and direct.fits(context):
                return _by_part(step, direct.logits(context))
            with step_context(context):
                output = self._model(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=batch.logit_rows,
                )
            return _by_part(step, output.logits.squeeze(0))

        return compute

    @torch.inference_mode()
    def change_attention(self, attention: AttentionTier, blocks: Sequence[int]) -> None:
        """Attend in another way from now on; what is in the cache stays there, in the other's layout.

        Args:
            attention: of the same block size; the one so far is the portable one, which has a slot a token.
            blocks: those that hold something.

        Raises:
            ValueError: the blocks have another size.
        """
        if attention.block_size != self.block_size:
            raise ValueError(f"blocks of {self.block_size} tokens cannot become blocks of {attention.block_size}")
        if blocks:
            count = len(blocks) * self.block_size
            snapshot = Snapshot()
            whole = Step(-1, (ScheduledSequence(-1, 0, (0,) * count, tuple(blocks), samples=False),))
            batch = pack(whole, snapshot, block_size=self.block_size).on(snapshot.upload(lambda host: host))
            for pages in self.cache.layers:
                keys, values = (tensor[batch.slots] for tensor in (pages.keys, pages.values))
                attention.write(pages, batch, keys, values)
        self._attention = attention

    def release(self, seq_id: int) -> None:
        """Nothing: all that is remembered is in the blocks."""

    def probe_step(self) -> Step:
        """See ModelForward."""
        part = ScheduledSequence(seq_id=-1, start=0, token_ids=(0,), blocks=(self.cache.scratch_block,), samples=True)
        return Step(-1, (part,))


def _by_part(step: Step, logits: torch.Tensor) -> StepLogits:
    """The logits that `pack` asked for, by whose they are."""
    if not any(part.scores_prompt for part in step.sequences):
        return StepLogits(logits, {})
    last: list[torch.Tensor] = []
    prompts: dict[int, PromptLogits] = {}
    first = 0
    for part in step.sequences:
        end = first + (len(part.token_ids) if part.scores_prompt else int(part.samples))
        if part.scores_prompt:
            prompts[part.seq_id] = PromptLogits(part.start, logits[first:end])
        if part.samples:
            last.append(logits[end - 1])
        first = end
    return StepLogits(torch.stack(last) if last else logits[:0], prompts)


def chunked_layers(text_config: Any) -> dict[int, int]:
    """Attention chunk sizes by layer.

    Llama 4 says them in its mask alone, which a registry function does not get.
    """
    size = getattr(text_config, "attention_chunk_size", None)
    layer_types = getattr(text_config, "layer_types", None) or ()
    return {index: int(size) for index, kind in enumerate(layer_types) if kind == "chunked_attention" and size}
