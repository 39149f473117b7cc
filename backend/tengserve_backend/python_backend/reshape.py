"""The shapes that clients see and those that the model has, where config.pbtxt sets a `reshape`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tengserve_backend.inference import InferRequest, InferTensor


@dataclass(frozen=True, slots=True)
class Reshape:
    """Two shapes of one tensor: -1 is any size, and the first -1 of one is the first of the other.

    Attributes:
        outside: as clients see it, with the batch dimension where there is one.
        inside: as the model has it, with the same batch dimension.
    """

    outside: tuple[int, ...]
    inside: tuple[int, ...]

    def inward(self, tensor: InferTensor) -> InferTensor:
        """A client's tensor, whose shape has been checked, as the model gets it."""
        return _reshaped(tensor, self.outside, self.inside)

    def outward(self, tensor: InferTensor) -> InferTensor:
        """The model's tensor as a client gets it.

        Raises:
            ValueError: the model has made another shape than its `reshape`.
        """
        fits = len(tensor.shape) == len(self.inside) and all(
            want in (-1, size) for want, size in zip(self.inside, tensor.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"output '{tensor.name}' must have the shape {list(self.inside)} of its reshape, not "
                f"{list(tensor.shape)}"
            )
        return _reshaped(tensor, self.inside, self.outside)


def reshaped_inputs(request: InferRequest, reshapes: Mapping[str, Reshape]) -> InferRequest:
    """The request with its inputs as the model gets them; `reshapes` is by the input's name."""
    if not reshapes:
        return request
    inputs = tuple(
        reshapes[tensor.name].inward(tensor) if tensor.name in reshapes else tensor for tensor in request.inputs
    )
    return replace(request, inputs=inputs)


def _reshaped(tensor: InferTensor, given: tuple[int, ...], wanted: tuple[int, ...]) -> InferTensor:
    sizes = iter([size for want, size in zip(given, tensor.shape, strict=True) if want < 0])
    return replace(tensor, data=tensor.data.reshape([next(sizes) if want < 0 else want for want in wanted]))
