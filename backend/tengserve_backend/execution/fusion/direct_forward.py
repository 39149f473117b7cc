"""A causal language model's forward without what stands around its parts.

transformers' forward makes masks, checks arguments and collects outputs in some hundred calls of Python, whatever the
model computes: a tenth of a step of one token of a small model. Where all layers are one operator, the rest is an
embedding, angles, a norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tengserve_backend.execution.attention.registry import StepContext
from tengserve_backend.execution.fusion.agreement import Left, disagreement
from tengserve_backend.execution.fusion.angles import AngleLookup
from tengserve_backend.execution.fusion.decoder_stack import DecoderLayers, DecoderStack
from tengserve_backend.execution.fusion.operators import FusedOperators
from tengserve_backend.execution.fusion.replacing import has_hooks
from tengserve_backend.execution.fusion.rotary import RotaryHook
from tengserve_backend.execution.fusion.tried_steps import logits_in_pages, our_attention, run_in_pages

_ATTRIBUTE: Final = "_tengserve_direct_forward"


@dataclass(frozen=True, slots=True)
class DirectForward:
    """All that a model of llama's shape computes, for the steps that its layers as one can compute.

    Nobody holds the model here, so its weights go with it.

    Attributes:
        embedding: ids to hidden states.
        angles: of the tokens of a step.
        stack: its layers.
        norm, head: of hidden states, and to logits.
    """

    embedding: Callable[[torch.Tensor], torch.Tensor]
    angles: AngleLookup
    stack: DecoderStack
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]

    def fits(self, context: StepContext) -> bool:
        """Whether it can compute a step."""
        return self.stack.fits(context)

    def logits(self, context: StepContext) -> torch.Tensor:
        """[rows, vocabulary] of a step that fits; rows are those that the batch wants."""
        batch = context.batch
        hidden = self.embedding(batch.input_ids)
        hidden = self.stack.run(hidden, self.angles(hidden, batch), context)
        if not batch.wants_all:
            # A norm is of each row alone.
            hidden = hidden[:, batch.logit_rows]
        return self.head(self.norm(hidden)).squeeze(0)


def direct_forward(model: Any) -> DirectForward | None:
    """How a model's steps can be computed without its own forward, if they can."""
    found: DirectForward | None = vars(model).get(_ATTRIBUTE)
    return found


def fuse_forward(model: Any, operators: FusedOperators, _: Callable[[], object]) -> Iterator[Left | None]:
    """Let steps call a model's parts instead of the model, where that gives its logits, to the bit.

    Args:
        model: whose layers may have become one.
        operators: of the device.

    Yields:
        None when it was done; why not, where the layers are one and nothing else is as it should be.
    """
    if operators.decoder is None or not any(isinstance(module, DecoderLayers) for module in model.modules()):
        return
    try:
        direct = _direct(model)
    except Exception as error:  # foreign model code, some of which asks for the kind of layer
        if operators.is_fault(error):
            raise
        direct = f"its parts fail with {type(error).__name__} where nothing else is given"
    kind = type(model).__name__
    if isinstance(direct, str):
        yield Left(kind, direct)
        return
    tier = operators.decoder.tier
    with our_attention(model):
        reason = disagreement(
            lambda: logits_in_pages(model, tier, of_all=False),
            lambda: run_in_pages(
                lambda context: direct.logits(context).unsqueeze(0), tier, like=next(model.parameters())
            ),
            operators.is_fault,
            exactly=True,
        )
    if not reason:
        setattr(model, _ATTRIBUTE, direct)
    yield Left(kind, reason) if reason else None


@torch.no_grad()
def _direct(model: Any) -> DirectForward | str:
    """A model of llama's shape by its parts, or why that cannot be: one clause.

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
    if any(has_hooks(each, but=RotaryHook) or "forward" in vars(each) for each in (model, base, *found)):
        return "something else is called before, after or instead of a forward"
    embedding, rotary, norm, head = found
    hidden = embedding(torch.zeros(1, 1, dtype=torch.int64))
    if not layers.stack.are_angles(rotary(hidden, position_ids=torch.zeros(1, 1, dtype=torch.int64)), hidden):
        return "its angles are no cosine and sine for every element of a head"
    angles = AngleLookup(rotary, hidden, model.config.get_text_config().max_position_embeddings)
    # Their forwards, for a call of the module looks for hooks again.
    return DirectForward(embedding.forward, angles, layers.stack, norm.forward, head.forward)
