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
    specs = {spec.name: spec for spec in config.inputs}
    given: set[str] = set()
    for tensor in request.inputs:
        if tensor.name not in specs:
            raise _wrong(request, f"unexpected inference input '{tensor.name[:64]}' for model '{model}'", tensor.name)
        if tensor.name in given:
            raise _wrong(request, f"input '{tensor.name}' already exists in request", tensor.name)
        given.add(tensor.name)
    if request.outputs:
        _check_outputs(model, config, request)
    if len(given) < len(specs):
        _check_complete(model, config.inputs, given, request)
    batch = 1 if config.max_batch_size == 0 else _checked_batch(model, config, request)
    for tensor in request.inputs:
        _check_tensor(model, config, specs[tensor.name], tensor, request)
    return batch


def _wrong(request: InferRequest, message: str, field: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(request_label(request.request_id) + message, field=field[:64] if field else None)


def _check_outputs(model: str, config: PythonConfig, request: InferRequest) -> None:
    known = {spec.name for spec in config.outputs}
    seen: set[str] = set()
    for output in request.outputs:
        if output.name not in known:
            raise _wrong(request, f"unexpected inference output '{output.name[:64]}' for model '{model}'", output.name)
        if output.name in seen:
            raise _wrong(request, f"output '{output.name}' already exists in request", output.name)
        seen.add(output.name)


def _check_complete(model: str, specs: tuple[TensorSpec, ...], given: set[str], request: InferRequest) -> None:
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
        request,
        f"{expected} but got {len(given)} inputs for model '{model}'. Got input(s) {_names(sorted(given))}, but "
        f"missing required input(s) {_names(missing)}. Please provide all required input(s).",
        missing[0],
    )


def _names(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name[:64]}'" for name in list(names)[:_MAX_NAMES]) + "]"


def _checked_batch(model: str, config: PythonConfig, request: InferRequest) -> int:
    batch: int | None = None
    for tensor in request.inputs:
        if not tensor.shape:
            raise _wrong(
                request,
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{model}'",
                tensor.name,
            )
        if batch is None:
            batch = tensor.shape[0]
        elif tensor.shape[0] != batch:
            raise _wrong(
                request, f"input '{tensor.name}' batch size does not match other inputs for '{model}'", tensor.name
            )
    if batch is not None and batch > config.max_batch_size:
        raise _wrong(request, f"inference request batch-size must be <= {config.max_batch_size} for '{model}'")
    return max(1, batch or 0)


def _check_tensor(
    model: str, config: PythonConfig, spec: TensorSpec, tensor: InferTensor, request: InferRequest
) -> None:
    if tensor.datatype is not spec.datatype:
        raise _wrong(
            request,
            f"inference input '{spec.name}' data-type is '{tensor.datatype.value}', but model '{model}' expects "
            f"'{spec.datatype.value}'",
            spec.name,
        )
    if not _fits(spec.shape, tensor.shape):
        note = _BATCH_NOTE if config.max_batch_size > 0 else ""
        raise _wrong(
            request,
            f"unexpected shape for input '{spec.name}' for model '{model}'. Expected {_dims(spec.shape)}, got "
            f"{_dims(tensor.shape)}. {note}",
            spec.name,
        )


def _fits(wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(shape) != len(wanted):
        return False
    for want, size in zip(wanted, shape, strict=True):  # noqa: SIM110 - `all` makes a generator, for every tensor
        if want not in (-1, size):
            return False
    return True


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
