"""Operations of simulated devices: each is the CPU's, on the bytes that the tensors stand for, with the CPU's bits.

A tensor of the CPU, or of another device, beside one of a device is refused as a GPU refuses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.simulated_device.memory import contiguous, fresh, host_view, on_device
from tests.simulated_device.streams import current_device, current_stream, default_stream

__all__ = ["register"]

_library = torch.library.Library("aten", "IMPL")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NAME = "sim"

# Pure arithmetic on shapes, which the CPU's kernels do for any tensor.
_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "set_")
# Compositions for which the CPU has a way of its own, with bits of its own.
_FUSED = ("scaled_dot_product_attention", "linear")
# Asked of devices alone.
_INSTEAD = {"convolution_overrideable": torch.ops.aten.convolution.default}
# Indices may lie on the CPU, as with GPUs.
_TAKE_INDICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# What was made otherwise below.
_OWN = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::_local_scalar_dense",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::resize_",
    "aten::record_stream",
    "aten::histc",
}


class _Pinned(bytearray):
    """Memory of the host that a device copies from and to by itself."""


_pinned: weakref.WeakValueDictionary[int, _Pinned] = weakref.WeakValueDictionary()


def register() -> None:
    """Give torch the operations; once in a process."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        own_name = name.removeprefix("aten::").partition(".")[0]
        is_of_cpu = name.startswith("aten::") and has_kernel(name, "CPU")
        if name in _OWN or not (is_of_cpu or name in {f"aten::{each}" for each in _FUSED}):
            continue
        if own_name in _VIEWS:
            _library.impl(name, _on_shapes(_operation(name)), "PrivateUse1")
        else:
            _library.impl(name, _as_on_cpu(_operation(name)), "PrivateUse1")
    for each, operation in _INSTEAD.items():
        _library.impl(each, _as_on_cpu(operation), "PrivateUse1")
    _library.impl("histc", _as_on_cpu(_histogram, name="aten::histc"), "PrivateUse1")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("resize_", _resize, "PrivateUse1")
    _library.impl("_local_scalar_dense", _scalar, "PrivateUse1")
    _library.impl("_copy_from", _copy, "PrivateUse1")
    _library.impl("_pin_memory", _pin_memory, "CPU")
    _library.impl("is_pinned", _is_pinned, "CPU")


def _operation(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _on_shapes(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return operation.redispatch(_CPU, *args, **kwargs)

    return run


def _as_on_cpu(operation: Any, *, name: str = "") -> Callable[..., Any]:
    name = name or operation._schema.name
    call = operation if name == "aten::histc" else _taking_numbers(operation)

    def run(*args: Any, **kwargs: Any) -> Any:
        flat, form = pytree.tree_flatten((args, kwargs))
        index = _device_of(flat, name)
        stream = current_stream(index)
        if stream is not default_stream(index):
            raise NotImplementedError(f"{name} in a stream of its own: only copies are simulated")
        stream.run()
        hosts: list[Any] = [_host(each) for each in flat]
        shapes = {id(host): host.shape for host in hosts if isinstance(host, torch.Tensor)}
        host_args, host_kwargs = pytree.tree_unflatten(hosts, form)
        result = call(*host_args, **host_kwargs)
        given = {
            id(host): each
            for each, host in zip(flat, hosts, strict=True)
            if isinstance(each, torch.Tensor) and each is not host
        }
        for each, host in zip(flat, hosts, strict=True):
            if id(host) in given and host.shape != shapes[id(host)]:
                _become(each, on_device(_own(host), index))

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return given[id(value)] if id(value) in given else on_device(_own(value), index)

        return pytree.tree_map(wrap, result)

    return run


def _taking_numbers(operation: Any) -> Callable[..., Any]:
    """The operation, and where a number came for a tensor, as it does out of C++, its form for numbers."""
    places = [
        place
        for place, each in enumerate(operation._schema.arguments)
        if isinstance(each.type, torch.TensorType) and not each.kwarg_only
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        for place in places:
            if place < len(args) and isinstance(args[place], (int, float)):
                return operation.overloadpacket(*args, **kwargs)
        return operation(*args, **kwargs)

    return call


def _histogram(
    tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0
) -> torch.Tensor:
    """Of whole numbers, too, as on a GPU and not on the CPU."""
    return torch.histc(tensor.double(), bins, min, max).to(tensor.dtype)


def _device_of(flat: Sequence[Any], name: str) -> int:
    """The one device that all tensors are on."""
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    indices = {each.device.index for each in tensors if each.device.type == _NAME}
    for each in tensors:
        is_strange = each.device.type != _NAME and each.dim() > 0 and name not in _TAKE_INDICES
        if is_strange or len(indices) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted({str(each.device) for each in tensors}))}! ({name})"
            )
    if indices:
        return int(indices.pop())
    named = [each for each in flat if isinstance(each, torch.device)]
    return named[0].index or 0 if named else current_device()


def _host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Tensor) and value.device.type == _NAME:
        return host_view(value)
    return value


def _own(host: torch.Tensor) -> torch.Tensor:
    """The same in a storage that has nothing before it."""
    return host if host.storage_offset() == 0 and not host.is_conj() else host.clone()


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor, in its place, the storage and shape of another."""
    set_to = torch.ops.aten.set_.source_Storage_storage_offset
    set_to.redispatch(_CPU, tensor, other.untyped_storage(), 0, other.size(), other.stride())


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: object = None,
) -> torch.Tensor:
    return _empty_strided(size, contiguous(size), dtype=dtype, device=device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    index = None if device is None else device.index
    host = fresh(size, stride, dtype or torch.get_default_dtype())
    return on_device(host, current_device() if index is None else index)


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: object = None
) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(size):
        host = fresh(size, contiguous(size), tensor.dtype)
        host.view(-1)[: tensor.numel()] = host_view(tensor).reshape(-1)[: host.numel()]
        _become(tensor, on_device(host, tensor.device.index))
    return tensor


def _scalar(tensor: torch.Tensor) -> Any:
    current_stream(tensor.device.index).synchronize()
    return host_view(tensor).item()


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on = target if target.device.type == _NAME else source
    stream = current_stream(on.device.index)
    into = host_view(target) if target.device.type == _NAME else target
    if source.device.type == _NAME:
        out_of = host_view(source)
        if source.device != on.device:
            current_stream(source.device.index).run()
        if target.device.type == _NAME:
            stream.note(lambda: into.copy_(out_of))
        else:

            def leave() -> None:
                left = out_of.clone()
                stream.arrive(lambda: into.copy_(left))

            stream.note(leave)
    else:
        # What is not pinned is read before this returns, whatever was said.
        there = source if non_blocking and _is_pinned(source) else source.clone()
        stream.note(lambda: into.copy_(there))
    is_on_host = "cpu" in (source.device.type, target.device.type)
    if is_on_host and not non_blocking:
        stream.synchronize()
    return target


def _is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in _pinned


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    if not tensor.numel():
        return tensor.clone()
    buffer = _Pinned(tensor.nbytes)
    pinned = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
    _pinned[pinned.data_ptr()] = buffer
    return pinned.copy_(tensor)
