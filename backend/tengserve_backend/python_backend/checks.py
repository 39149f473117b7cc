"""Whether a request fits a model's configuration, in Triton's words: clients and their tests compare them."""

from __future__ import annotations

from collections.abc import Iterable

from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.inference import InferRequest, InferTensor, TensorSpec
from tengserve_backend.python_backend.config import PythonConfig

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
_MAX_NAMES = 32
"""Names that one message lists."""


def request_label(request_id: str) -> str:
    """What Triton puts before a complaint about a request."""
    return f"[request id: {request_id[:64] or '<id_unknown>'}] "


def check_request(model: str, config: PythonConfig, request: InferRequest) -> int:
    """Check the tensors of a request.

    Returns:
        Its batch size; 1 for a model without a batch dimension.

    Raises:
        InvalidRequestError: they do not fit.
    """
    label = request_label(request.request_id)
    specs = {spec.name: spec for spec in config.inputs}
    given: set[str] = set()
    for tensor in request.inputs:
        if tensor.name not in specs:
            raise _wrong(label, f"unexpected inference input '{tensor.name[:64]}' for model '{model}'", tensor.name)
        if tensor.name in given:
            raise _wrong(label, f"input '{tensor.name}' already exists in request", tensor.name)
        given.add(tensor.name)
    _check_outputs(label, model, config, request)
    _check_complete(label, model, config.inputs, request.inputs)
    batch = _check_batch(label, model, config, request.inputs)
    for tensor in request.inputs:
        _check_tensor(label, model, config, specs[tensor.name], tensor)
    return batch


def _wrong(label: str, message: str, field: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(label + message, field=field[:64] if field else None)


def _check_outputs(label: str, model: str, config: PythonConfig, request: InferRequest) -> None:
    known = {spec.name for spec in config.outputs}
    seen: set[str] = set()
    for output in request.outputs:
        if output.name not in known:
            raise _wrong(label, f"unexpected inference output '{output.name[:64]}' for model '{model}'", output.name)
        if output.name in seen:
            raise _wrong(label, f"output '{output.name}' already exists in request", output.name)
        seen.add(output.name)


def _check_complete(label: str, model: str, specs: tuple[TensorSpec, ...], tensors: tuple[InferTensor, ...]) -> None:
    given = {tensor.name for tensor in tensors}
    missing = [spec.name for spec in specs if not spec.optional and spec.name not in given]
    if not missing:
        return
    required = sum(not spec.optional for spec in specs)
    expected = (
        f"expected {required} inputs"
        if required == len(specs)
        else f"expected number of inputs between {required} and {len(specs)}"
    )
    raise _wrong(
        label,
        f"{expected} but got {len(given)} inputs for model '{model}'. Got input(s) {_names(sorted(given))}, but "
        f"missing required input(s) {_names(missing)}. Please provide all required input(s).",
        missing[0],
    )


def _names(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name[:64]}'" for name in list(names)[:_MAX_NAMES]) + "]"


def _check_batch(label: str, model: str, config: PythonConfig, tensors: tuple[InferTensor, ...]) -> int:
    if config.max_batch_size == 0:
        return 1
    batch: int | None = None
    for tensor in tensors:
        if not tensor.shape:
            raise _wrong(
                label,
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{model}'",
                tensor.name,
            )
        if batch is None:
            batch = tensor.shape[0]
        elif tensor.shape[0] != batch:
            raise _wrong(
                label, f"input '{tensor.name}' batch size does not match other inputs for '{model}'", tensor.name
            )
    if batch is not None and batch > config.max_batch_size:
        raise _wrong(label, f"inference request batch-size must be <= {config.max_batch_size} for '{model}'")
    return max(1, batch or 0)


def _check_tensor(label: str, model: str, config: PythonConfig, spec: TensorSpec, tensor: InferTensor) -> None:
    if tensor.datatype is not spec.datatype:
        raise _wrong(
            label,
            f"inference input '{spec.name}' data-type is '{tensor.datatype.value}', but model '{model}' expects "
            f"'{spec.datatype.value}'",
            spec.name,
        )
    fits = len(tensor.shape) == len(spec.shape) and all(
        want in (-1, got) for want, got in zip(spec.shape, tensor.shape, strict=True)
    )
    if not fits:
        note = _BATCH_NOTE if config.max_batch_size > 0 else ""
        raise _wrong(
            label,
            f"unexpected shape for input '{spec.name}' for model '{model}'. Expected {_dims(spec.shape)}, got "
            f"{_dims(tensor.shape)}. {note}",
            spec.name,
        )


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
