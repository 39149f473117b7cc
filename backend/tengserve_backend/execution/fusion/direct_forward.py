"""A causal language model's forward without what stands around its parts.

transformers' forward makes masks, checks arguments and collects outputs in some hundred calls of Python, whatever the
model computes: a tenth of a step of one token of a small model. Where all layers are one operator, the rest is an
embedding, angles, a norm and the head.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tengserve_backend.execution.attention.registry import current_context
from tengserve_backend.execution.fusion.agreement import Left, disagreement
from tengserve_backend.execution.fusion.decoder_stack import DecoderLayers, DecoderStack
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.replacing import has_hooks
from tengserve_backend.execution.fusion.tried_steps import logits_in_pages, our_attention

_ARGUMENTS = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class DirectOutput:
    """What is left of a model's output.

    Attributes:
        logits: [1, rows, vocabulary].
    """

    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Parts:
    """All that a model of llama's shape computes.

    Attributes:
        embedding, angles, norm, head: its modules.
        stack: its layers.
    """

    embedding: Callable[..., torch.Tensor]
    angles: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    stack: DecoderStack
    norm: Callable[..., torch.Tensor]
    head: Callable[..., torch.Tensor]


class DirectForward:
    """Takes the place of a model's forward. What is not a step that the stack can compute goes to the model's own.

    Args:
        model: whose forward it will be.
        parts: of it.
    """

    def __init__(self, model: Any, parts: _Parts) -> None:
        # The model has this; a reference back would keep its weights until somebody collects garbage.
        self._own = weakref.WeakMethod(model.forward)
        self._parts = parts
        # For those who ask which names its arguments have.
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As a step calls the model, else as its own forward takes it."""
        if args or not self._is_step(options):
            own: Any = self._own()
            return own(*args, **options)
        parts = self._parts
        hidden = parts.embedding(options["input_ids"])
        angles = parts.angles(hidden, position_ids=options["position_ids"])
        hidden = parts.stack(hidden, position_embeddings=angles)
        # A norm is of each row alone.
        return DirectOutput(parts.head(parts.norm(hidden[:, options["logits_to_keep"]])))

    def _is_step(self, options: dict[str, Any]) -> bool:
        return (
            options.keys() == _ARGUMENTS
            and options["attention_mask"] is None
            and options["use_cache"] is False
            and isinstance(options["logits_to_keep"], torch.Tensor)
            and self._parts.stack.fits(current_context())
        )


def fuse_forward(model: torch.nn.Module, operators: FusedOperators, _: Callable[[], object]) -> Iterator[Left | None]:
    """Call a model's parts instead of the model, where that gives its logits, to the bit.

    Args:
        model: whose layers may have become one.
        operators: of the device.

    Yields:
        None when it was done; why not, where the layers are one and nothing else is as it should be.
    """
    if operators.decoder is None or not any(isinstance(module, DecoderLayers) for module in model.modules()):
        return
    parts = _parts(model)
    kind = type(model).__name__
    if isinstance(parts, str):
        yield Left(kind, parts)
        return
    tier = operators.decoder.tier

    def replace() -> torch.Tensor:
        model.forward = DirectForward(model, parts)
        return logits_in_pages(model, tier, of_all=False)

    with our_attention(model):
        reason = disagreement(
            lambda: logits_in_pages(model, tier, of_all=False), replace, operators.is_fault, exactly=True
        )
    if reason:
        # It had none of its own, and none was given to it when the trial ended before.
        vars(model).pop("forward", None)
    yield Left(kind, reason) if reason else None


def _parts(model: Any) -> _Parts | str:
    """Those of a model of llama's shape, or why there are none: one clause.

    What somebody put around a forward, as a hook or in its place, would no longer be called.
    """
    base = getattr(model, "model", None)
    layers = getattr(base, "layers", None)
    found: list[Any] = [
        model.get_input_embeddings(),
        getattr(base, "rotary_emb", None),
        getattr(base, "norm", None),
        model.get_output_embeddings(),
    ]
    if not isinstance(layers, DecoderLayers) or not all(isinstance(each, torch.nn.Module) for each in found):
        return "it has other parts than an embedding, angles, layers, a norm and a head"
    if base is None or has_hooks(base) or any("forward" in vars(each) for each in (model, base)):
        return "something else is called before, after or instead of a forward"
    embedding, angles, norm, head = found
    return _Parts(embedding, angles, layers.stack, norm, head)
