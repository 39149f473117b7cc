"""All layers of a decoder by one operator, where a step's attention is the operator's own.

A step of one token calls some four hundred operators, each of which wakes and awaits the threads and returns to
Python; that takes longer than what is computed between reading the weights. The operator computes what they compute,
in the same order and with the same roundings: it is used where its answer is theirs to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.execution.attention.observe import ObservedAttention
from tengserve_backend.execution.attention.registry import StepContext, current_context
from tengserve_backend.execution.attention.tier import AttentionSpec, AttentionTier
from tengserve_backend.execution.fusion.agreement import Left, Trial, disagreement, random_input
from tengserve_backend.execution.fusion.angles import Angles
from tengserve_backend.execution.fusion.decoder_parts import DecoderParts, decoder_parts
from tengserve_backend.execution.fusion.operators import DecoderOperators, FusedOperators
from tengserve_backend.execution.fusion.tried_steps import (
    logits_in_pages,
    our_attention,
    run_in_pages,
    takes_our_attention,
)
from tengserve_backend.execution.kv_tensors import LayerShape

# A model may scale by the position only far beyond those of a prompt.
_FAR = 1_000_000


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer and how it attends.

    Attributes:
        parts: of the layer.
        query_heads: of its attention.
        shape: of its keys and values.
        spec: what it asks of attention.
        rotary: whether it rotates queries and keys.
    """

    parts: DecoderParts
    query_heads: int
    shape: LayerShape
    spec: AttentionSpec
    rotary: bool


class DecoderStack:
    """Layers in the place of one: called as transformers calls a layer, it computes them all.

    Args:
        operators: that compute it.
        layers: of one shape, in their order.
    """

    def __init__(self, operators: DecoderOperators, layers: Sequence[_Layer]) -> None:
        self._tier = operators.tier.name
        self._modules = [layer.parts.module for layer in layers]
        self._indices = tuple(layer.parts.index for layer in layers)
        self._shape = layers[0].shape
        self._head_dim = layers[0].parts.head_dim
        self._operator = _decoder(operators, layers).run

    def fits(self, context: StepContext | None) -> bool:
        """Whether it can compute a step."""
        return context is not None and context.tier.name == self._tier and not context.chunks

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Any = None,
        cache: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """[1, T, hidden size] to [1, T, hidden size], inside a step context that fits."""
        context = current_context()
        if (
            context is None
            or attention_mask is not None
            or cache is not None
            or not self.are_angles(position_embeddings, hidden_states)
        ):
            for module in self._modules:
                hidden_states = module(
                    hidden_states,
                    attention_mask=attention_mask,
                    position_embeddings=position_embeddings,
                    cache=cache,
                    **others,
                )
            return hidden_states
        context.enter_layers(self._indices)
        return self.run(hidden_states, position_embeddings, context)

    def run(self, hidden: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """All layers of a step that fits: [1, T, hidden size] to the same.

        Args:
            hidden: the first layer's input.
            angles: see `are_angles`.
            context: of the step.
        """
        keys, values = context.cache.tensors(self._indices, self._shape)
        batch = context.batch
        answer: torch.Tensor = self._operator(
            hidden, *angles, keys, values, batch.slots, batch.block_table, batch.query_ends, batch.contexts
        )
        return answer

    def are_angles(self, embeddings: Any, hidden: torch.Tensor) -> bool:
        """Whether position embeddings are a cosine and a sine for every element of a head."""
        if not isinstance(embeddings, tuple) or len(embeddings) != 2:
            return False
        shape = (1, hidden.shape[1], self._head_dim)
        return all(each.shape == shape and each.dtype == hidden.dtype for each in embeddings)


class DecoderLayers(torch.nn.ModuleList):
    """A model's layers, which are one while a step runs that the operator can compute.

    Otherwise, and for whoever asks for a single one, they are what they were: with masks and all that a model gives
    each of its layers.

    Args:
        layers: the model's own.
        stack: all of them as one.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], stack: DecoderStack) -> None:
        super().__init__(layers)
        self.stack = stack

    def __getitem__(self, index: Any) -> Any:
        """A layer, or a list of some."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        whole = range(len(self))[index] == range(len(self))
        return list(self) if whole else list(self._modules.values())[index]

    def __iter__(self) -> Iterator[Any]:
        if self.stack.fits(current_context()):
            return iter((self.stack,))
        return super().__iter__()


def fuse_decoder_stacks(
    model: torch.nn.Module, operators: FusedOperators, _: Callable[[], object]
) -> Iterator[Left | Trial | None]:
    """Let the operator compute a model's layers where it gives their answer, to the bit.

    Yields:
        after each layer that was tried, and for each list of layers: None when it is used, else why not.
    """
    decoder = operators.decoder
    if decoder is None or not takes_our_attention(model):
        return
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.ModuleList and len(child)
    ]
    for parent, name, child in lists:
        parts = [decoder_parts(layer) for layer in child]
        known = [each for each in parts if each is not None]
        if len(known) == len(parts):
            yield from _replace(model, parent, name, known, decoder, operators.is_fault)


def _replace(
    model: Any,
    parent: torch.nn.Module,
    name: str,
    parts: Sequence[DecoderParts],
    operators: DecoderOperators,
    is_fault: Callable[[BaseException], bool],
) -> Iterator[Left | Trial | None]:
    kind = type(parts[0].module).__name__
    layers: list[_Layer] = []
    for each in parts:
        with our_attention(model):
            layer = _tried(each, operators, is_fault)
        if isinstance(layer, str):
            yield Left(kind, layer)
            return
        layers.append(layer)
        yield Trial.GOES_ON
    if len({(layer.query_heads, layer.shape) for layer in layers}) > 1:
        yield Left(kind, "its layers are of several shapes")
        return
    own = getattr(parent, name)
    with our_attention(model):

        def replace() -> torch.Tensor:
            parent.add_module(name, DecoderLayers([each.module for each in parts], DecoderStack(operators, layers)))
            return logits_in_pages(model, operators.tier)

        reason = disagreement(lambda: logits_in_pages(model, operators.tier), replace, is_fault, exactly=True)
    if reason:
        parent.add_module(name, own)
    yield Left(kind, reason) if reason else None


def _tried(parts: DecoderParts, operators: DecoderOperators, is_fault: Callable[[BaseException], bool]) -> _Layer | str:
    """How a layer attends, or why the operator may not compute it: one clause."""
    observed = ObservedAttention(operators.tier)
    try:
        expected = _outputs(parts, parts.module, observed)
    except Exception as error:  # foreign model code that was meant for other input
        if is_fault(error):
            raise
        return f"it fails with {type(error).__name__} on random input"
    query_heads, spec, pages = observed.calls[0]
    if spec.softcap is not None or spec.sinks is not None or spec.chunk is not None:
        return "its attention has a softcap, sinks or chunks"
    shape = LayerShape(pages.keys.shape[1], pages.keys.shape[2], pages.values.shape[2])
    reason = ""
    for rotary in (True, False):
        layer = _Layer(parts, query_heads, shape, spec, rotary)
        why = disagreement(
            lambda: expected,
            # Called within the loop's turn.
            lambda: _outputs(parts, DecoderStack(operators, [layer]), operators.tier),  # noqa: B023
            is_fault,
            exactly=True,
        )
        if not why:
            return layer
        reason = reason or why
    return reason


@torch.no_grad()
def _outputs(parts: DecoderParts, layer: Callable[..., torch.Tensor], tier: AttentionTier) -> torch.Tensor:
    """What a layer gives for the tried steps: random rows at random angles."""
    like = parts.attention_norm.weight

    def run(context: StepContext) -> torch.Tensor:
        batch = context.batch
        tokens = batch.input_ids.shape[1]
        angles = random_input(2, 1, tokens, parts.head_dim, like=like).float()
        return layer(
            random_input(1, tokens, like.shape[0], like=like),
            attention_mask=None,
            position_ids=batch.position_ids + _FAR,
            position_embeddings=(angles[0].cos().to(like.dtype), angles[1].sin().to(like.dtype)),
            cache=None,
            use_cache=False,
        )

    return run_in_pages(run, tier, like=like)


def _decoder(operators: DecoderOperators, layers: Sequence[_Layer]) -> Any:
    first = layers[0]
    shape = first.shape
    decoder = operators.decoder(
        first.parts.attention_norm.weight.shape[0],
        first.query_heads,
        shape.heads,
        shape.key_dim,
        shape.value_dim,
        first.parts.down.in_features,
    )
    for layer in layers:
        parts, spec = layer.parts, layer.spec
        query_norm, key_norm = (
            (None, 0.0) if norm is None else (norm.weight, norm.epsilon) for norm in (parts.query_norm, parts.key_norm)
        )
        decoder.add_layer(
            *(parts.attention_norm.weight, parts.attention_norm.epsilon),
            *(parts.projected.packed, parts.projected.packed_bias, *query_norm, *key_norm),
            *(parts.output.packed, parts.output.packed_bias),
            *(parts.mlp_norm.weight, parts.mlp_norm.epsilon),
            *(parts.gate_up.packed, parts.gate_up.packed_bias, parts.down.packed, parts.down.packed_bias),
            *(spec.scaling, spec.window, layer.rotary),
        )
    return decoder
