"""Linear layers over packed weights: in the order in which the device's operator reads them, once in memory.

Layers that a model calls one after the other on the same input become one product: each of them gives its part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.fusion.agreement import Left, disagreement, random_input
from tengserve_backend.execution.fusion.operators import FusedOperators, PackedLinearOperators
from tengserve_backend.execution.fusion.quantized import QuantizedWeight, product
from tengserve_backend.execution.fusion.replacing import Replacement, has_hooks, replace_modules
from tengserve_backend.execution.fusion.watching import weights_read

_log = logging.getLogger(__name__)

# Siblings that transformers' models call on the same input, by their names.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TRIED_ROWS = 3
_TRIED_ROWS_QUANTIZED = 40
# Shares as in agreement.py: only the answer itself is rounded.
_QUANTIZED_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


class PackedLinear(torch.nn.Module):
    """torch.nn.Linear, but for its weight.

    Args:
        operators: that compute it.
        weight: [out, in], quantized where the operators want that; packed here, and not kept.
        bias: [out], or None.
    """

    def __init__(
        self,
        operators: PackedLinearOperators,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Plain attributes: torch finds those of a module without a search, and no copy is made for another dtype.
        self.packed = operators.pack(weight)
        self.packed_bias = None if bias is None else bias.detach()
        self._linear = operators.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return self._linear(x, self.packed, self.packed_bias, self.in_features, self.out_features)


class _SharedProduct:
    """One product in the place of several on the same input, kept until each of them has had its part.

    Args:
        linear: all the layers as one.
        sizes: out features of each.
    """

    def __init__(self, linear: PackedLinear, sizes: Sequence[int]) -> None:
        self.linear = linear
        self._sizes = list(sizes)
        self._x: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """One layer's answer, in whatever order they are asked. Another input, or a second question, computes anew."""
        # The input itself is kept, so no other one can be taken for it.
        if x is not self._x or index not in self._parts:
            self._parts = dict(enumerate(self.linear(x).split(self._sizes, -1)))
            self._x = x
        part = self._parts.pop(index)
        if not self._parts:
            self._x = None
        return part


class LinearPart(torch.nn.Module):
    """One of several linear layers that are computed as one.

    Args:
        product: of all of them.
        index: which one.
    """

    def __init__(self, product: _SharedProduct, index: int) -> None:
        super().__init__()
        self._product = product
        self._index = index

    @property
    def product(self) -> tuple[PackedLinear, int]:
        """All of the layers as one, and which of them this is."""
        return self._product.linear, self._index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return self._product.part(x, self._index)


def pack_linears(model: torch.nn.Module, operators: FusedOperators, run: Callable[[], object]) -> Iterator[Left | None]:
    """Replace every linear layer that the operator agrees with; its own weight is let go.

    A weight that something else has, as a tied embedding does, stays there besides the packed one. A layer whose
    weight other code reads, past the layer itself, stays as it is: running the model shows it.

    Args:
        model: whose layers are replaced.
        operators: of the device.
        run: runs the model on anything.

    Yields:
        as `replace_modules`.
    """
    packed = operators.packed_linear
    if packed is None:
        return
    read = weights_read(filter(_is_plain, model.modules()), run)
    for parent in list(model.modules()):
        for names in _GROUPS:
            members = [getattr(parent, name, None) for name in names]
            if all(_is_plain(member) and id(member) not in read for member in members):
                yield from _merged(parent, names, members, packed, operators.is_fault)
            del members
    embeddings = {id(each.weight): type(each) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    head = _head(model)

    def replacement(module: torch.nn.Module) -> Replacement:
        if not _is_plain(module):
            return None
        if id(module) in read:
            return Left("Linear", "other code reads its weight")
        own = operators.packed_head if module is head and operators.packed_head is not None else packed
        answer = _packed(module, own, operators.is_fault)
        embedding = embeddings.get(id(module.weight))
        # The weight of a plain one is let go afterwards where its rows can be read from what is packed.
        shared = embedding is torch.nn.Embedding and own.quantize is None and operators.packed_rows is not None
        if isinstance(answer, PackedLinear) and embedding is not None and not shared:
            size = answer.packed.numel() * answer.packed.element_size() / 2**20
            _log.info("the embedding is the head's weight too: packed besides, that takes %.0f MiB more", size)
        return answer

    yield from replace_modules(model, replacement)


@torch.no_grad()
def _packed(
    module: Any, operators: PackedLinearOperators, is_fault: Callable[[BaseException], bool]
) -> PackedLinear | Left:
    made: list[PackedLinear] = []

    def make(weight: torch.Tensor | QuantizedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        made.append(PackedLinear(operators, weight, module.bias))
        return made[0]

    reason = _disagreement(module, module.weight, module.bias, operators, make, is_fault)
    return Left("Linear", reason) if reason else made[0]


@torch.no_grad()
def _merged(
    parent: torch.nn.Module,
    names: Sequence[str],
    members: Sequence[Any],
    operators: PackedLinearOperators,
    is_fault: Callable[[BaseException], bool],
) -> list[None]:
    """Put the parts of one product in the place of layers; nothing when they cannot be one, or when that is wrong."""
    first = members[0]
    if any(
        member.in_features != first.in_features
        or member.weight.dtype != first.weight.dtype
        or (member.bias is None) != (first.bias is None)
        for member in members
    ):
        return []
    parts: list[LinearPart] = []
    bias = None if first.bias is None else torch.cat([member.bias for member in members])

    def make(weight: torch.Tensor | QuantizedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        product = _SharedProduct(PackedLinear(operators, weight, bias), [member.out_features for member in members])
        parts.extend(LinearPart(product, index) for index in range(len(members)))
        return lambda x: torch.cat([part(x) for part in parts], -1)

    def own(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([member(x) for member in members], -1)

    # Why not is said when each is tried alone, afterwards.
    if _disagreement(own, torch.cat([member.weight for member in members]), bias, operators, make, is_fault):
        return []
    for name, part in zip(names, parts, strict=True):
        parent.add_module(name, part)
    return [None] * len(parts)


def _disagreement(
    own: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operators: PackedLinearOperators,
    make: Callable[[torch.Tensor | QuantizedWeight], Callable[[torch.Tensor], torch.Tensor]],
    is_fault: Callable[[BaseException], bool],
) -> str:
    """Why a packed layer may not replace others; see `agreement.disagreement`.

    A quantized one answers otherwise than they do, and must: it is compared with what its own integers stand for. When
    even that differs, nobody would expect the layer to stay as it was.

    Raises:
        ConfigurationError: a quantized layer answers something else.
    """
    if operators.quantize is None:
        x = random_input(_TRIED_ROWS, weight.shape[1], like=weight)
        return disagreement(lambda: own(x), lambda: make(weight)(x), is_fault)
    quantized = operators.quantize(weight)
    # One way through the operator is for few rows and one for many, and a row answers the same in both.
    x = random_input(_TRIED_ROWS_QUANTIZED, weight.shape[1], like=weight)

    def run() -> torch.Tensor:
        linear = make(quantized)
        answer = linear(x)
        few = linear(x[:_TRIED_ROWS])
        return torch.where((few == answer[:_TRIED_ROWS]).all(), answer, torch.nan)

    reason = disagreement(lambda: product(x, quantized, bias), run, is_fault, bound=_QUANTIZED_BOUNDS.get(x.dtype))
    if reason:
        raise ConfigurationError(
            f"the weights cannot be quantized: a layer of {weight.shape[0]} by {weight.shape[1]} numbers does not "
            f"answer what its integers stand for ({reason}); set quantization to none"
        )
    return ""


def _head(model: Any) -> torch.nn.Module | None:
    """The layer that gives the logits, if the model says which that is."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, torch.nn.Module) else None


def _is_plain(module: object) -> bool:
    """Quantized or adapted layers are of derived classes, and hooks belong to somebody."""
    return type(module) is torch.nn.Linear and not has_hooks(module)
