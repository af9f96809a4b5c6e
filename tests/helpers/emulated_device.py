"""An accelerator that computes on the CPU and refuses what CUDA refuses, for machines without a GPU.

    with emulated_device() as device:           # torch.device("fgpu:0")
        model.to(device)(tokens.to(device))     # computes
        model(tokens)                           # RuntimeError: all tensors must be on one device

Tensors of `fgpu:0` are wrappers of CPU tensors. Mixing them with CPU tensors, CPU generators or numpy raises, by the
rules of CUDA: CPU tensors of no dimensions may take part in elementwise operations, CPU indices may index, `copy_` and
`to` copy between devices. Operations that wait for the device (`item`, `tolist`, `cpu`, boolean indices, ...) are
counted in `SYNCS` by the line of the project that called them.

It finds tensors on the wrong device. It knows nothing of speed, memory, streams, NCCL, Triton or DeepSpeed, and does
not see generators and gradients of the device that go to tensors of the CPU.

What it changes in torch: the device's name and hooks can be registered once in a process and not be taken back, so
`reserve()` registers the device's guard as the process begins (autograd makes its threads for devices at the first
backward pass), and the rest is registered at the first use. While no `emulated_device()` is open the device is not
available and makes no tensors, and `torch.tensor`, `torch.arange`, ... and `torch.Generator` are torch's own.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.utils._device
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import backend_registration
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_iter, tree_map_only

NAME = "fgpu"
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
SYNCS: Counter[str] = Counter()
"""How often a line of the project waited for the device, as "attention/plan.py:12"; the caller clears it."""

# Operations that may take tensors of both devices; of the second kind only the indices may be the CPU's.
_TRANSFERS = {"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# What CUDA computes elementwise takes CPU tensors of no dimensions; these are not elementwise.
_NOT_ELEMENTWISE = {
    *("cat", "stack", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear", "embedding", "gather", "index_select"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_"),
}
_ABSENT = {"histogram", "histogramdd"}  # CUDA has no kernel
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}


class _Module(backend_registration._DummyBackendModule):
    """`torch.fgpu`: available while an `emulated_device` is open."""

    open = 0

    def is_available(self) -> bool:
        return self.open > 0

    def device_count(self) -> int:
        return int(self.open > 0)

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _MODULE.is_available()


_MODULE = _Module()
_HOOK = _Hook()
_GUARD = backend_registration._DummyDeviceGuard()
_TENSOR = torch.tensor
_AS_TENSOR = torch.as_tensor
_GENERATOR = torch.Generator
# What torch makes in C++, or resizes there, where no Python sees it.
_MADE_ON_CPU = ("tensor", "arange", "eye", "linspace", "logspace", "randperm", "tril_indices", "triu_indices")
_reserved = False
_registered = False


def reserve() -> None:
    """Register the device's guard, before the first backward pass of the process: without it autograd has no thread for
    the device, and the first backward pass on it ends in an assertion of torch."""
    global _reserved
    if not _reserved:
        torch._C._acc.register_python_privateuseone_device_guard(_GUARD)
        _reserved = True


def _register() -> None:
    """Register name, methods (`Tensor.fgpu()`), module and hooks of the device, once in a process."""
    global _registered
    reserve()
    # `with torch.device(...)` knows these functions by themselves, from its first use in the process on
    torch.utils._device._device_constructors()
    if not _registered:
        torch.utils.rename_privateuse1_backend(NAME)
        torch.utils.generate_methods_for_privateuse1_backend()
        torch._register_device_module(NAME, _MODULE)
        torch._C._acc.register_python_privateuseone_hook(_HOOK)
        _registered = True


@contextmanager
def emulated_device() -> Iterator[torch.device]:
    """Make the device available and yield it, "fgpu:0". May be nested; tensors of it are of no use afterwards."""
    _register()
    _MODULE.open += 1
    try:
        if _MODULE.open > 1:
            yield torch.device(NAME, 0)
            return
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
        try:
            changes = {name: _made_on_cpu(getattr(torch, name)) for name in _MADE_ON_CPU}
            with mock.patch.multiple(torch, **changes, as_tensor=_as_tensor, Generator=_Generator):
                yield torch.device(NAME, 0)
        finally:
            library._destroy()
    finally:
        _MODULE.open -= 1


def is_emulated(device: Any) -> bool:
    """Return whether `device` (a device, its name or None) is the emulated one."""
    return device is not None and torch.device(device).type == NAME


class EmulatedTensor(Tensor):
    """A tensor whose device is `fgpu:0` and whose numbers are those of `cpu_tensor`, a view of the same memory."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> EmulatedTensor:
        result = Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.shape,
            dtype=cpu_tensor.dtype,
            device=torch.device(NAME, 0),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
        )
        result.cpu_tensor = cpu_tensor.detach()
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.cpu_tensor!r} on {NAME}:0"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                # torch makes tensors of lists where no Python sees it, and cannot make ours.
                args = (args[0], _without_lists(args[1]), *args[2:])
            elif func is torch.nn.functional.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
            return func(*args, **kwargs)

    # What torch does with the memory of a tensor, which ours has elsewhere.

    @property
    def data(self) -> EmulatedTensor:
        with torch.no_grad():
            return EmulatedTensor(self.cpu_tensor)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, EmulatedTensor):
            raise RuntimeError(f"attempted to set `data` of a {NAME} tensor to a tensor of {value.device}")
        if (value.shape, value.stride(), value.dtype) == (self.shape, self.stride(), self.dtype):
            self.cpu_tensor = value.cpu_tensor
            return
        fresh = EmulatedTensor(value.cpu_tensor).requires_grad_(self.requires_grad)
        fresh.__dict__.update(self.__dict__, cpu_tensor=value.cpu_tensor)  # `_is_param`
        torch.utils.swap_tensors(self, fresh)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """By which modules change their parameters in place, as they do on CUDA: tied weights stay tied."""
        return ["cpu_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> EmulatedTensor:
        return EmulatedTensor(inner["cpu_tensor"])

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedTensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = EmulatedTensor(self.cpu_tensor.clone())
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
        return memo[id(self)]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.cpu_tensor.untyped_storage()

    def data_ptr(self) -> int:
        return self.cpu_tensor.data_ptr()

    def tolist(self) -> Any:
        _count_sync()
        return self.cpu_tensor.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        created = _TENSOR(data, dtype=self.dtype if dtype is None else dtype)
        return created.to(self.device if device is None else device).requires_grad_(requires_grad)


class _GeneratorType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class _EmulatedGenerator(_GENERATOR):
    """A generator of the emulated device: draws the numbers that a CPU generator of its seed draws."""

    alive: ClassVar[weakref.WeakSet[_EmulatedGenerator]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    @classmethod
    def includes(cls, generator: torch.Generator) -> bool:
        """Return whether it is one of these: what operations are given is another object for the same generator."""
        state = generator.get_state()
        return any(torch.equal(one.get_state(), state) for one in cls.alive)


class _Generator(metaclass=_GeneratorType):
    """`torch.Generator` while the device is in use."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return _EmulatedGenerator() if is_emulated(device) else _GENERATOR(device)


def _device_of_context() -> torch.device | None:
    """Return the device of the innermost `with torch.device(...)`; `torch.get_default_device` makes a tensor for it."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else None


def _made_on_cpu(real: Any) -> Any:
    """Return a function of torch that makes its tensor on the CPU and moves it to the emulated device."""

    @wraps(real)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if not is_emulated(_device_of_context() if device is None else device):
            return real(*args, **kwargs) if device is None else real(*args, device=device, **kwargs)
        device = torch.device(NAME, 0)
        generator = kwargs.get("generator")
        if generator is not None and not _EmulatedGenerator.includes(generator):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({real.__name__})")
        requires_grad = kwargs.pop("requires_grad", False)
        return real(*args, device="cpu", **kwargs).to(device).requires_grad_(requires_grad)

    return make


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which shares memory where it can, for the same reason."""
    if not is_emulated(device):
        return _AS_TENSOR(data, dtype=dtype, device=device)
    return (data if isinstance(data, Tensor) else _AS_TENSOR(data)).to(device=device, dtype=dtype)


def _without_lists(index: Any) -> Any:
    """Return an index with tensors instead of lists of numbers."""

    def as_index(part: Any) -> Any:
        if not isinstance(part, (list, range)):
            return part
        return _TENSOR(list(part)) if len(part) else _TENSOR([], dtype=torch.long)

    return tuple(map(as_index, index)) if isinstance(index, tuple) else as_index(index)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by torch's own operations: its choice of kernels knows no device of this kind."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # which that operation adds as ones and zeros
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    result = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result[0]


def _count_sync() -> None:
    """Count a wait for the device at the innermost line of the project that caused it."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and name != __file__ and "site-packages" not in name:
            SYNCS[f"{name.removeprefix(_ROOT)}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back
    SYNCS["elsewhere"] += 1


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation of ATen on the CPU, after the checks of CUDA; results are the device's if an argument is, or if
    `device` says so."""
    if not _MODULE.open:
        raise RuntimeError(f"{NAME}:0 is in use only within emulated_device()")
    name = func._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(tensor, EmulatedTensor) for tensor in tensors)
    if on_device:
        _check_devices(func, name, tensors, args)
    device = kwargs.get("device")
    to_device = on_device if device is None else is_emulated(device)
    _check_generator(func, to_device, args, kwargs)
    if name in _WAITING or (name == "_to_copy" and on_device and not to_device) or _by_booleans(name, args):
        _count_sync()
    if name == "copy_" and not isinstance(args[0], EmulatedTensor):
        _count_sync()
    if is_emulated(device):
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    of_cpu = {id(tensor) for tensor in tensors if not isinstance(tensor, EmulatedTensor)}
    wrappers: dict[int, EmulatedTensor] = {}

    def bare(tensor: EmulatedTensor) -> Tensor:
        wrappers[id(tensor.cpu_tensor)] = tensor
        return tensor.cpu_tensor

    bare_args, bare_kwargs = tree_map_only(EmulatedTensor, bare, (args, kwargs))
    result = _substitute(name, func)(*bare_args, **bare_kwargs)
    for wrapper in wrappers.values():
        if wrapper.shape != wrapper.cpu_tensor.shape or wrapper.stride() != wrapper.cpu_tensor.stride():
            raise NotImplementedError(f"the emulated device has no {func}, which changes a tensor's shape in place")

    def wrapped(tensor: Tensor) -> Tensor:
        if id(tensor) in wrappers:  # changed in place
            return wrappers[id(tensor)]
        if not to_device or id(tensor) in of_cpu:
            return tensor
        # A wrapper cannot say that its numbers are to be read as their conjugates or negatives, as a view's can
        return EmulatedTensor(tensor.resolve_conj().resolve_neg())

    return tree_map_only(Tensor, wrapped, result)


def _check_devices(func: Any, name: str, tensors: list[Tensor], args: Any) -> None:
    """Refuse an operation that mixes CPU tensors with the device's.

    Raises:
        NotImplementedError: For an operation that CUDA does not have.
        RuntimeError: For tensors on two devices.
    """
    if name in _ABSENT:
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the '{NAME}' backend")
    if name in _TRANSFERS:
        return
    cpu = [tensor for tensor in tensors if not isinstance(tensor, EmulatedTensor)]
    if name in _INDEXING:
        indices = {id(index) for index in args[1]}
        same_device = isinstance(args[0], EmulatedTensor)
        bad = not same_device or any(id(tensor) not in indices and tensor.dim() for tensor in cpu)
    else:
        elementwise = name not in _NOT_ELEMENTWISE
        bad = any(tensor.dim() or not elementwise for tensor in cpu)
        written = func._schema.arguments[0].alias_info if func._schema.arguments else None
        bad |= bool(cpu) and written is not None and written.is_write and not isinstance(args[0], EmulatedTensor)
    if bad:
        shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"({func}: {shapes})"
        )


def _check_generator(func: Any, to_device: bool, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a generator of another device than the numbers'.

    Raises:
        RuntimeError: For it.
    """
    for value in (*args, *kwargs.values()):
        if to_device and isinstance(value, _GENERATOR) and not _EmulatedGenerator.includes(value):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({func})")


def _by_booleans(name: str, args: Any) -> bool:
    """Return whether an indexing counts the true ones among its indices, which waits for the device."""
    return name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])


def _substitute(name: str, func: Any) -> Any:
    """Return what computes an operation that CUDA has for types that the CPU has not."""
    if name == "histc":  # of whole numbers: how mixtures of experts count the tokens of each

        def histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return func(values.double(), *args, **kwargs).to(values.dtype)

        return lambda values, *args, **kwargs: (func if values.is_floating_point() else histc)(values, *args, **kwargs)
    return func
