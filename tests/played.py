"""CUDA devices that are played on a CPU: real values, CUDA's rules, and counts.

    with played.devices() as meter:
        played.put(model, "cuda:0")
        ...
    meter.launches, meter.waits, meter.copies

A `Played` tensor holds real values and says that it lies on `cuda:N`. Mixing devices is refused as
CUDA refuses it. Kernel launches, waits of the host (with the line of fly that waits) and copies
between devices are counted. A graph records its operations and runs them again over the same
memory, so that a value of the host that a capture has baked in stays what it was, and a wait within
a capture is refused. What is not played: time, streams that run at once, and rounding.
"""

from __future__ import annotations

import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

FLY = f"{Path(__file__).resolve().parent.parent / 'fly'}/"
_INDEXES = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_READ_BY_HOST = {
    "aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero",
    "aten::masked_select", "aten::unique", "aten::_unique2", "aten::unique_dim",
}  # fmt: skip


@dataclass
class Meter:
    """What the host did since the last `reset`.

    launches: kernels, graphs counting as one each; nodes: kernels within replayed graphs. waits: by
    the line of fly that waits, and why. copies: between host and device, or devices.
    """

    launches: int = 0
    nodes: int = 0
    replays: int = 0
    captures: int = 0
    names: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    recording: list[Callable[[], Any]] | None = None
    forbids_waits: bool = False

    def reset(self) -> None:
        self.launches = self.nodes = self.replays = self.captures = 0
        for counter in (self.names, self.waits, self.copies):
            counter.clear()

    def launch(self, name: str, again: Callable[[], Any]) -> None:
        """One kernel. again: computes it once more, over the same memory."""
        if self.recording is not None:
            self.recording.append(again)
            return
        self.launches += 1
        self.names[name] += 1

    def wait(self, why: str) -> None:
        where = next(
            (
                f"{frame.f_code.co_filename.removeprefix(FLY)}:{line}"
                for frame, line in traceback.walk_stack(None)
                if frame.f_code.co_filename.startswith(FLY)
            ),
            "not in fly",
        )
        if self.forbids_waits or self.recording is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why} at {where}")
        self.waits[f"{where} {why}"] += 1

    def copy(self, source: torch.device, destination: torch.device, blocks: bool) -> None:
        if destination.type == "cpu":
            self.copies["D2H"] += 1
            self.wait("D2H")
        elif source.type == "cpu":
            if self.recording is not None:
                raise RuntimeError("a copy from the host's pageable memory cannot be captured")
            self.copies["H2D"] += 1
            if blocks:
                self.wait("H2D that blocks")
        else:
            self.copies["P2P"] += 1


METER = Meter()


def device_of(where: Any) -> torch.device:
    found = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


class Played(torch.Tensor):
    """Real values that say that they lie on a CUDA device."""

    held: torch.Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, real: torch.Tensor, where: Any) -> Played:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
        )
        result.held, result.where = real, device_of(where)
        return result

    device = property(lambda self: self.where)
    is_cuda = property(lambda self: True)
    is_meta = is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"Played({self.held}, {self.where})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


def real(tensor: Any) -> Any:
    return tensor.held if isinstance(tensor, Played) else tensor


def _tensors(*trees: Any) -> list[torch.Tensor]:
    """In the order that they stand in. Called several times for each kernel, as is `_mapped`:
    `torch.utils._pytree` would be most of a test's time."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list)):
            found += _tensors(*tree)
        elif isinstance(tree, dict):
            found += _tensors(*tree.values())
    return found


def _mapped(func: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuples, lists and dictionaries with other leaves."""
    if isinstance(tree, tuple):
        return tuple([_mapped(func, part) for part in tree])
    if isinstance(tree, list):
        return [_mapped(func, part) for part in tree]
    if isinstance(tree, dict):
        return {key: _mapped(func, part) for key, part in tree.items()}
    return func(tree)


def _run(name: str, where: torch.device, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute on the real values; counts a launch unless only views came of it."""
    plain_args, plain_kwargs = _mapped(real, args), _mapped(real, kwargs)
    given = _tensors(args, kwargs)
    known = {id(real(tensor)): tensor for tensor in given}
    memory = {real(tensor).untyped_storage().data_ptr() for tensor in given}
    out = func(*plain_args, **plain_kwargs)
    outs = _tensors(out)
    writes = getattr(getattr(func, "_schema", None), "is_mutable", False)
    if (
        any(o.numel() for o in outs)
        and "empty" not in name
        and (writes or any(o.untyped_storage().data_ptr() not in memory for o in outs))
    ):

        def again() -> None:
            new = func(*plain_args, **plain_kwargs)
            if not writes:
                for old, value in zip(outs, _tensors(new)):
                    old.copy_(value)

        METER.launch(name, again)
    if where.type != "cuda" or not outs:
        return out

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known.get(id(leaf)) if id(leaf) in known else Played(leaf, where)

    if all(id(tensor) in known for tensor in outs):
        return _mapped(wrapped, out)
    # views of tensors from outside of an inference mode have to be such, too
    with torch.inference_mode(
        torch.is_inference_mode_enabled() and all(tensor.is_inference() for tensor in given)
    ):
        return _mapped(wrapped, out)


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name in ("aten::_to_copy", "aten::to"):
        options = {key: kwargs.get(key) for key in ("device", "dtype")}
        return _moved(args[0], **options, non_blocking=kwargs.get("non_blocking", False), copy=True)
    if name == "aten::copy_":
        into, value = args[:2]
        if into.device != value.device:
            blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            METER.copy(value.device, into.device, blocks)
        if into.numel():
            given = real(value)
            METER.launch("copy", lambda: real(into).copy_(given))
        real(into).copy_(real(value))
        return into
    places = {t.device for t in _tensors(args, kwargs) if t.dim() or isinstance(t, Played)}
    if name in _INDEXES:
        where = args[0].device
        for index in _tensors(args[1]):
            if index.dtype in (torch.bool, torch.uint8):
                METER.wait("an index by a mask")
            elif index.device.type == "cpu" and index.numel():
                METER.copy(index.device, where, True)
            elif index.device != where and index.device.type != "cpu":
                raise RuntimeError(f"indices should be on the CPU or on the same device ({where})")
        places = {where, *(v.device for v in args[2:3] if v.dim())}
    if len(places) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, places)))}: {name}"
        )
    where = places.pop()
    if kwargs.get("device") is not None:
        where, kwargs = device_of(kwargs["device"]), {**kwargs, "device": "cpu"}
    if name in _READ_BY_HOST:
        METER.copies["D2H"] += 1
        METER.wait(name.removeprefix("aten::"))
    return _run(name, where, func, args, kwargs)


def _moved(
    tensor: torch.Tensor, device: Any = None, dtype: Any = None, non_blocking: bool = False,
    copy: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`tensor.to(device, dtype)`."""
    where = tensor.device if device is None else device_of(device)
    old, moves = real(tensor), where != tensor.device
    new = old.to(dtype or old.dtype, copy=moves or copy)
    if new is old:
        return tensor
    if tensor.numel():
        if moves:
            METER.copy(tensor.device, where, not non_blocking)
        METER.launch("copy", lambda: new.copy_(old))
    return Played(new, where) if where.type == "cuda" else new


class _Mode(TorchFunctionMode):
    """Factories and moves, which PyTorch would take to a CUDA that is not there, and attention,
    which is one kernel."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            places = {t.device for t in _tensors(args, kwargs)}
            if len(places) > 1:
                raise RuntimeError(f"attention over several devices: {sorted(map(str, places))}")
            where = places.pop()
            return _run("attention", where, func, args, kwargs)
        if func is torch._C._nn.pad_sequence and isinstance(args[0][0], Played):
            for _ in args[0]:  # one copy each
                METER.launch("copy", lambda: None)
            return _run("pad_sequence", args[0][0].device, func, args, kwargs)
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            options = {k: kwargs.get(k) for k in ("device", "dtype")}
            if func is torch.Tensor.cpu:
                options["device"] = "cpu"
            for given in args[1:]:
                if isinstance(given, torch.Tensor):
                    options = {"device": given.device, "dtype": given.dtype}
                elif isinstance(given, torch.dtype):
                    options["dtype"] = given
                elif isinstance(given, (str, int, torch.device)) and not isinstance(given, bool):
                    options["device"] = given
            to_cuda = options["device"] is not None and device_of(options["device"]).type == "cuda"
            if to_cuda or isinstance(args[0], Played):
                how = {k: kwargs.get(k, False) for k in ("non_blocking", "copy")}
                return _moved(args[0], **options, **how)
        elif func is torch.Tensor.tolist and isinstance(args[0], Played):
            METER.copy(args[0].device, torch.device("cpu"), True)
            return args[0].held.tolist()
        elif func is torch.Tensor.__setitem__ and isinstance(args[0], Played):
            tensor, index, value = args
            if isinstance(value, (int, float, bool)) and not _tensors(index):
                METER.launch("fill", lambda: tensor.held.__setitem__(index, value))
                return tensor.held.__setitem__(index, value)
        elif (
            (given := kwargs.get("device")) is not None
            and device_of(given).type == "cuda"
            and not any(isinstance(tensor, Played) for tensor in _tensors(args))
        ):
            where, name = device_of(given), getattr(func, "__name__", "factory")
            if name in ("tensor", "as_tensor"):
                METER.copy(torch.device("cpu"), where, True)
            return _run(name, where, func, args, {**kwargs, "device": "cpu"})
        return func(*args, **kwargs)


class _Graph:
    """What was launched while it was recorded, to be run again."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], Any]] = []

    def replay(self) -> None:
        METER.replays += 1
        METER.launch("graph", lambda: None)
        METER.nodes += len(self.nodes)
        for node in self.nodes:
            node()


@contextmanager
def _recorded(graph: _Graph, **kwargs: Any) -> Iterator[None]:
    METER.recording = graph.nodes
    METER.captures += 1
    try:
        yield
    finally:
        METER.recording = None


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        METER.wait("an event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


def _stream(*args: Any, **kwargs: Any) -> Any:
    return types.SimpleNamespace(wait_stream=lambda other: None)


def _forbid_waits(mode: Any) -> None:
    METER.forbids_waits = mode in ("error", 2)


@contextmanager
def devices() -> Iterator[Meter]:
    """CUDA as played, within the block."""
    torch._C._ensureCUDADeviceGuardSet()  # else views of such tensors ask for a driver
    one_byte = types.SimpleNamespace(name="played", total_memory=1)
    api = {
        "synchronize": lambda device=None: METER.wait("cudaDeviceSynchronize"),
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "Stream": _stream,
        "current_stream": _stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _recorded,
        "graph_pool_handle": lambda: None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": _forbid_waits,
        "get_device_properties": lambda device: one_byte,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
    }
    METER.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name, played in api.items():
            patch.setattr(torch.cuda, name, played)
        with _Mode():
            yield METER


def put(module: Any, where: Any = "cuda:0") -> Any:
    """The module with its parameters and buffers on a played device; `where` may be a function of
    their names. In place; tied weights stay tied."""
    place = where if callable(where) else lambda name: where
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules():
        for kind in (part._parameters, part._buffers):
            for name, old in kind.items():
                if old is None:
                    continue
                if id(old) not in moved:
                    new = Played(old.detach().clone(), place(f"{prefix}.{name}"))
                    is_weight = kind is part._parameters
                    moved[id(old)] = torch.nn.Parameter(new, False) if is_weight else new
                kind[name] = moved[id(old)]
    return module


def spread(model: Any, gpus: int = 2) -> Any:
    """The model with its layers over played GPUs, and accelerate's real hooks between them."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layers = model.config.num_hidden_layers
    blocks = {"model.embed_tokens": 0, "model.rotary_emb": 0}
    blocks |= {f"model.layers.{index}": index * gpus // layers for index in range(layers)}
    blocks |= {"model.norm": gpus - 1, "lm_head": gpus - 1}
    put(
        model,
        lambda name: next(g for part, g in blocks.items() if f"{name}.".startswith(f"{part}.")),
    )
    for part, gpu in {"": 0, **blocks}.items():
        module = model.get_submodule(part) if part else model
        skip = model._skip_keys_device_placement
        hook = AlignDevicesHook(None, io_same_device=not part, skip_keys=skip)
        add_hook_to_module(module, hook)
        hook.execution_device = torch.device("cuda", gpu)
    model.hf_device_map = blocks
    return model
