"""The kernels of the simulated device: what the wheel has a kernel for computes on the host, in the device's memory.

They are registered with torch for the device's key, so that they serve every thread. An operator of torch runs torch's
own host kernel; one of `npu::` runs its reference function, or fails by name when there is none. Where the wheel has no
kernel, its own silent fall back to the host stays, but is counted.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_npu

from npu_sim.simulator import log
from npu_sim.simulator.memory import alias, on_device, to_device
from npu_sim.simulator.operators import INDEXING, KEPT, MIXING, READING

_KEY = "PrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_COMPOSED = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_CONTEXT_NULL = 107002

_runtime = ctypes.CDLL("libascendcl.so")
_runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
_runtime.aclrtGetSocName.restype = ctypes.c_char_p
_runtime.npu_sim_launch.argtypes = (ctypes.c_void_p,)
_runtime.npu_sim_host_read.argtypes = (ctypes.c_void_p,)
_soc = _runtime.aclrtGetSocName().decode()
_is_310p = _soc.startswith("Ascend310P")
_libraries: list[torch.library.Library] = []

Kernel = Callable[..., Any]


def install() -> None:
    """Register the kernels, once in a process, after the import of torch_npu."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu")}
    _libraries.extend(libraries.values())
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space not in libraries or name in KEPT:
            continue
        kernel = _kernel(name)
        if kernel is not None:
            libraries[space].impl(rest, kernel, _KEY, allow_override=True)


def _kernel(name: str) -> Kernel | None:
    """The simulated kernel of an operator; None leaves what there is."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
    operator = _find(name)
    if operator is None:
        return None
    if not has_kernel:
        if not name.startswith("aten::") or not _falls_back(name):
            return None
        return _fallback_kernel(name, torch.library.get_kernel(operator, _KEY))
    if special := _SPECIAL.get(name):
        return special(torch.library.get_kernel(operator, _KEY))
    if operator.is_view and name != "aten::contiguous":
        return None
    return _reference_kernel(name) if name.startswith("npu::") else _host_kernel(name, operator)


def _find(name: str) -> torch._ops.OpOverload | None:
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    return getattr(packet, overload or "default", None)


def _falls_back(name: str) -> bool:
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    return has("CPU") and not any(map(has, _COMPOSED))


# ---- what every kernel does


def _launch(name: str, device: torch.device) -> None:
    """Start a kernel: what its stream still has to do comes first."""
    _ask(_runtime.npu_sim_launch, name, device)
    log.note_native(name)


def _host_read(name: str, device: torch.device) -> None:
    """The host waits for a value of a kernel."""
    _ask(_runtime.npu_sim_host_read, name, device)
    log.note_host_read(name)


def _ask(function: Callable[[int], int], name: str, device: torch.device) -> None:
    """Call the runtime with the device's current stream."""
    error = _CONTEXT_NULL
    if torch_npu._C._npu_getDevice() == device.index:
        error = function(torch_npu._C._npu_getCurrentRawStream(device.index))
    if error == _CONTEXT_NULL:
        # The wheel's kernels hold this guard. It also gives a device to a thread that has none.
        with torch.npu.device(device):
            error = function(torch_npu._C._npu_getCurrentRawStream(device.index))
    if error:
        raise _error(name, error)


def _error(name: str, code: int) -> RuntimeError:
    """As the wheel words what a kernel of its own meets."""
    detail = _runtime.aclGetRecentErrMsg().decode()
    return RuntimeError(
        f"OPS function error: {name}, error code is {code}\n[ERROR] ERR01100 OPS call acl api failed\n{detail}"
    )


class _Call:
    """One call of a kernel: its arguments on the host's side, and the way back."""

    __slots__ = ("_mixes", "_name", "_originals", "device")

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._mixes = name in MIXING
        # The alias is kept with the original: an id is only good as long as its object lives.
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.device = _device_of(args) or _device_of(kwargs.values()) or _wanted_device(kwargs.get("device"))

    def down(self, value: Any) -> Any:
        """An argument for the host."""
        if isinstance(value, torch.Tensor):
            return self._down_tensor(value)
        if isinstance(value, (list, tuple)):
            return [self.down(item) for item in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def up(self, value: Any) -> Any:
        """A result for the device: the argument that it is, or a new tensor."""
        if isinstance(value, torch.Tensor):
            known = self._originals.get(id(value))
            return to_device(value, self.device) if known is None else known[1]
        if isinstance(value, (list, tuple)):
            return type(value)(self.up(item) for item in value)
        return value

    def remember(self, host: torch.Tensor, original: torch.Tensor) -> None:
        """Have `up` answer with a tensor of the caller's."""
        self._originals[id(host)] = (host, original)

    def _down_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "npu":
            if tensor.dim() > 0 and not self._mixes:
                raise RuntimeError(
                    f"{self._name}: Expected all tensors to be on the same device, found npu and {tensor.device}"
                )
            return tensor
        if tensor.device != self.device:
            raise RuntimeError(f"{self._name}: Expected all tensors to be on the same device, found two npu devices")
        if _is_310p and tensor.dtype is torch.bfloat16:
            raise RuntimeError(f"{self._name} takes no bfloat16 on {_soc}, error code is 161002")
        host = alias(tensor)
        self.remember(host, tensor)
        return host


def _device_of(values: Any) -> torch.device | None:
    for value in values:
        if on_device(value):
            return value.device
        if isinstance(value, (list, tuple)) and (found := _device_of(value)) is not None:
            return found
    return None


def _wanted_device(device: torch.device | None) -> torch.device:
    index = None if device is None else device.index
    return torch.device("npu", torch.npu.current_device() if index is None else index)


# ---- operators of torch


def _host_kernel(name: str, operator: torch._ops.OpOverload) -> Kernel:
    arguments = operator._schema.arguments
    outs = [argument.name for argument in arguments if argument.is_out]
    draws = any(argument.name == "generator" for argument in arguments)
    pins = any(argument.name == "pin_memory" for argument in arguments)
    reads, indexes = name in READING, name in INDEXING

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, args, kwargs)
        _launch(name, call.device)
        if reads or (indexes and _has_mask(args)):
            _host_read(name, call.device)
        host_args = [call.down(value) for value in args]
        host_kwargs = {key: call.down(value) for key, value in kwargs.items()}
        if draws:
            host_kwargs["generator"] = _host_generator(kwargs.get("generator"), call.device)
        if pins:
            host_kwargs["pin_memory"] = None
        grown = [out for out in outs if on_device(kwargs.get(out)) and kwargs[out].numel() == 0]
        for out in grown:
            host_kwargs[out] = torch.empty(0, dtype=kwargs[out].dtype)
        result = operator(*host_args, **host_kwargs)
        for out in grown:
            computed, original = host_kwargs[out], kwargs[out]
            original.resize_(computed.shape)
            alias(original).copy_(computed)
            call.remember(computed, original)
        return call.up(result)

    return kernel


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _host_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator of the host for one draw: by the seed of the device's own and by how often that has been used."""
    own = torch.npu.default_generators[device.index] if generator is None else generator
    state = own.get_state().view(torch.int64)
    seed, offset = (int(number) for number in state)
    state[1] = offset + 4
    own.set_state(state.view(torch.uint8))
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)


# ---- operators of torch_npu


@functools.cache
def _references() -> Mapping[str, Callable[..., Any]]:
    # At the first use: torch is still being imported when the kernels are registered.
    from npu_sim.simulator import references
    from support.npu_reference import references_for

    return {**references.REFERENCES, **references_for(_soc)}


def _reference_kernel(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        reference = _references().get(name)
        if reference is None:
            raise NotImplementedError(f"no reference for {name}")
        call = _Call(name, args, kwargs)
        _launch(name, call.device)
        host_args = [call.down(value) for value in args]
        return call.up(reference(*host_args, **{key: call.down(value) for key, value in kwargs.items()}))

    return kernel


# ---- operators without a kernel


def _fallback_kernel(name: str, original: torch._C._SafeKernelFunction) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        log.note_fallback(name)
        _runtime.npu_sim_count_fallback(name.encode())
        return original.call_boxed(_KEYS, *args, **kwargs)

    return kernel


# ---- copies and reads: the wheel's own way through the runtime, once there is nothing left to convert


def _copy_kernel(original: torch._C._SafeKernelFunction) -> Kernel:
    def raw(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        original.call_boxed(_KEYS, to, source, non_blocking)

    def kernel(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        plain = to.dtype == source.dtype and to.shape == source.shape and to.is_contiguous() and source.is_contiguous()
        if on_device(to) and on_device(source):
            if to.numel():
                _launch("aten::copy_", to.device)
                alias(to).copy_(alias(source))
        elif plain:
            raw(to, source, non_blocking)
        elif on_device(to):
            # As the wheel: bytes first, then the device converts.
            source = source.contiguous()
            staged = torch.empty(source.shape, dtype=source.dtype, device=to.device)
            raw(staged, source, non_blocking)
            kernel(to, staged)
        else:
            staged = torch.empty(to.shape, dtype=to.dtype, device=source.device)
            kernel(staged, source)
            arrived = torch.empty(to.shape, dtype=to.dtype)
            raw(arrived, staged, False)
            to.copy_(arrived)
        return to

    return kernel


def _to_copy_kernel(_: torch._C._SafeKernelFunction) -> Kernel:
    def kernel(
        source: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        result = torch.empty_like(
            source,
            dtype=dtype,
            layout=layout,
            device=device,
            pin_memory=bool(pin_memory),
            memory_format=memory_format or torch.preserve_format,
        )
        return result.copy_(source, non_blocking)

    return kernel


def _copy_from_and_resize_kernel(_: torch._C._SafeKernelFunction) -> Kernel:
    def kernel(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return to.resize_(source.shape).copy_(source)

    return kernel


def _scalar_kernel(original: torch._C._SafeKernelFunction) -> Kernel:
    def kernel(tensor: torch.Tensor) -> Any:
        log.note_host_read("aten::_local_scalar_dense")
        return original.call_boxed(_KEYS, tensor)

    return kernel


_SPECIAL: Mapping[str, Callable[[torch._C._SafeKernelFunction], Kernel]] = {
    "aten::copy_": _copy_kernel,
    "aten::_to_copy": _to_copy_kernel,
    "aten::_copy_from_and_resize": _copy_from_and_resize_kernel,
    "aten::_local_scalar_dense": _scalar_kernel,
}
