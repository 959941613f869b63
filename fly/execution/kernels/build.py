"""Compiles fly's kernels with LLVM (llvmlite), and runs them on PyTorch's OpenMP threads.

A second thread pool would compete with PyTorch's own for the cores: OpenMP's threads spin for a
while after each parallel region.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from hashlib import sha256
from typing import Any

import torch

from fly.errors import FlyError
from fly.execution.kernels import blocks, elementwise, formats, quantized, tiles, vector
from fly.paths import fly_home, write_whole
from fly.version import VERSION

try:
    import llvmlite.binding as llvm
except ImportError:  # no wheel for this platform
    llvm = None

_MUCH = 1 << 15  # elements of work that make other threads worth waking
_INSTRUCTIONS = {
    "amx": "sapphirerapids",
    "avx512_bf16": "cooperlake",
    "avx512": "skylake-avx512",
    "avx2": "haswell",
}
ROUND_INPUTS = ("amx", "avx512_bf16")  # bfloat16 is their own: products round inputs to it
_VECTORS = {
    "avx512_bf16": vector.AVX512_DOT,
    "avx512": vector.AVX512,
    "avx2": vector.AVX2,
}


@functools.cache
def why_not() -> str | None:
    """Why kernels cannot be compiled or run here; None if they can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"fly's kernels are written for x86-64, this is {platform.machine()}"
    if llvm is None:
        return "llvmlite cannot be imported"
    if _open_mp() is None:
        return "this build of PyTorch does not use an OpenMP with GOMP_parallel"
    if instructions() is None:
        return "this CPU has no AVX2 (or ATEN_CPU_CAPABILITY hides it)"
    return None


@functools.cache
def instructions() -> str | None:
    """`amx`, `avx512_bf16`, `avx512` or `avx2`: the instructions that kernels are compiled for;
    None without any.

    Restrictions of PyTorch (ATEN_CPU_CAPABILITY) and oneDNN (ONEDNN_MAX_CPU_ISA) apply here, too.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return "avx2"
    if capability != "AVX512":
        return None
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    allows_tiles = limit in ("ALL", "DEFAULT") or "AMX" in limit
    # bfloat16 comes with every CPU that has tiles; the system has to allow them to a process
    if allows_tiles and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        return "amx"
    # the CPUs that have these dot products have VNNI, too
    has_bfloat16 = any(name in limit for name in ("BF16", "FP16", "AVX10"))
    if (allows_tiles or has_bfloat16) and torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    return "avx512"


@functools.cache
def _open_mp() -> Any:
    """GOMP_parallel of the OpenMP that PyTorch loaded; None if it has no such function."""
    if platform.system() != "Linux":
        return None
    library = ctypes.CDLL(None)
    try:
        start = library.GOMP_parallel
    except AttributeError:
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


def run(function: int, *arguments: int, work: int = _MUCH) -> None:
    """Run a compiled function with these arguments on all of PyTorch's threads, or on this one
    alone where the elements that it goes through are few."""
    threads = torch.get_num_threads() if work >= _MUCH else 1
    block = (ctypes.c_int64 * len(arguments))(*arguments)
    _open_mp()(function, ctypes.addressof(block), threads, 0)


@functools.cache
def product(weights: str, instructions: str, *, of_many: bool = False) -> int:
    """Address of the matrix product's code, to be called by `run`.

    weights: bfloat16, int8 or a GGUF format. of_many: AMX's, for more than 32 rows.
    """
    unpacking = unpacking_of(weights, instructions)
    is_int8 = weights == "int8"
    if of_many:
        source = blocks.product(int8=is_int8, unpacking=unpacking)
    elif instructions != "amx":
        vectors = _VECTORS[instructions]
        if is_int8 and instructions == "avx512":
            vectors = vector.AVX512_DOT if torch.cpu._is_vnni_supported() else vector.AVX2
        source = vector.product(vectors, weights, unpacking)
    elif unpacking is not None:
        source = quantized.product(unpacking)
    else:
        source = tiles.product(int8=is_int8)
    return _compile(source, instructions, "product")


@functools.cache
def unpacking_function(name: str, form: str, instructions: str) -> int:
    """Address of the code that unpacks a GGUF format: `rows` of weights, or whole weights into a
    Bfloat16Linear's `panels`."""
    unpacking = unpacking_of(form, instructions)
    assert unpacking is not None
    return _compile(getattr(formats, name)(unpacking), instructions, name)


def unpacking_of(weights: str, instructions: str) -> formats.Unpacking | None:
    """How weights of a GGUF format are unpacked with these instructions; None for others."""
    if weights not in formats.FORMATS:
        return None
    has_dots, has_words = instructions in ROUND_INPUTS, instructions != "avx2"
    return formats.FORMATS[weights](dots=has_dots, words=has_words)


@functools.cache
def elementwise_function(name: str, *sizes: int, instructions: str) -> int:
    """Address of one of elementwise.py's functions: norm, gated, rotate, quantize or attention."""
    element = "bfloat" if instructions == "amx" else "float"
    source = getattr(elementwise, name)(element, *sizes)
    return _compile(source, instructions, name)


_engines: list[Any] = []  # hold the code: it is freed with them


def _compile(source: str, instructions: str, name: str) -> int:
    """Address of the function `name`. Compiling takes a load some seconds, so object files are kept
    in FLY_HOME for later processes."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source)
    module.verify()
    features = "-prefer-256-bit" + (",+avx512vnni" if "vpdpbusd" in source else "")
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=_INSTRUCTIONS[instructions], features=features, opt=3, jit=True
    )
    depends_on = f"{VERSION} {llvm.llvm_version_info} {machine.triple} {instructions} {features}\n"
    name_of_object = f"{sha256((depends_on + source).encode()).hexdigest()[:32]}.o"
    kept, made = _read(name_of_object), list[bytes]()
    if kept is None:
        # The loops are written as they should run: LLVM only allocates registers.
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
        llvm.create_pass_builder(machine, tuning).getModulePassManager().run(
            module, llvm.create_pass_builder(machine, tuning)
        )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, code: made.append(code), lambda _: kept)
    engine.finalize_object()
    _engines.append(engine)
    for code in made:
        _keep(name_of_object, code)
    address: int = engine.get_function_address(name)
    return address


def _read(name: str) -> bytes | None:
    """The object file that `_keep` wrote; None if there is none, or it is damaged."""
    try:
        content = (fly_home() / "kernels" / name).read_bytes()
    except (OSError, FlyError):
        return None
    digest, code = content[:32], content[32:]
    return code if sha256(code).digest() == digest else None


def _keep(name: str, code: bytes) -> None:
    with contextlib.suppress(OSError, FlyError):  # no place to write: the next process compiles
        path = fly_home() / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, sha256(code).digest() + code)
