"""The library of CPU kernels (`native/` in the repository has its source), and the structures it is called with."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

FILE = Path(__file__).with_name("libquire_cpu.so")

VERSION = 6
"""Of the functions and structures."""

LEVELS: Mapping[str, int] = MappingProxyType({"avx2": 0, "avx512": 1, "avx512_bf16": 2, "amx": 3})
"""Instruction sets that there are kernels for, the best last."""


class CMatrix(Structure):
    """`struct matrix`."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "k", "panel", "head")),
        *((name, c_int32) for name in ("kind", "group", "scale_kind", "has_zeros")),
        *((name, c_void_p) for name in ("weight", "scale", "zero", "values")),
    ]


class CLinear(Structure):
    """`struct linear`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("matrix", "x", "y", "bias")),
        *((name, c_int64) for name in ("rows", "x_stride", "y_stride")),
        *((name, c_int32) for name in ("x_bf16", "y_bf16", "bias_bf16", "gate", "inputs", "invariant", "rounded")),
    ]


class CAttention(Structure):
    """`struct attention`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("q", "out", "k", "v", "query_start", "kv_len", "page_table", "sinks")),
        *((name, c_int64) for name in ("spans", "heads", "groups", "dim", "value_dim", "page_size", "table_stride")),
        *((name, c_int64) for name in ("q_stride", "window", "chunk", "most")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_int32) for name in ("q_bf16", "kv_bf16")),
    ]


class CNorm(Structure):
    """`struct norm`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "residual", "out", "weight", "bias")),
        *((name, c_int64) for name in ("rows", "size")),
        *((name, c_float) for name in ("eps", "scale")),
        *((name, c_int32) for name in ("bf16", "weight_bf16", "centred")),
    ]


class CRope(Structure):
    """`struct rope`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("qkv", "q", "k_pool", "v_pool", "slots", "cos", "sin", "q_norm", "k_norm")),
        *((name, c_int64) for name in ("rows", "heads", "groups", "dim", "half", "page_size", "stride")),
        *((name, c_float) for name in ("q_eps", "k_eps")),
        *((name, c_int32) for name in ("bf16", "weight_bf16", "interleaved")),
    ]


class CLookup(Structure):
    """`struct lookup`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("matrix", "which", "out")),
        ("count", c_int64),
        *((name, c_int32) for name in ("inputs", "bf16")),
    ]


class CCall(Structure):
    """`struct call`."""

    _fields_: ClassVar = [("arguments", c_void_p), ("kernel", c_int32), ("apart", c_int32), ("next", c_int64)]


KERNELS: Mapping[type[Structure], int] = MappingProxyType({CLinear: 0, CAttention: 1, CNorm: 2, CRope: 3})
"""Numbers of kernels in `CCall`, by what they are called with."""


class CBlocks(Structure):
    """`struct blocks`."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("inputs", "k")),
        ("type", c_int32),
        *((name, c_void_p) for name in ("weight", "scale")),
    ]


@cache
def load() -> ctypes.CDLL | None:
    """The library; None where it does not run: on other systems and processors."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not FILE.exists():
        return None
    try:
        library = ctypes.CDLL(str(FILE))
    except OSError:
        return None
    if library.quire_version() != VERSION:
        return None
    library.quire_linear.argtypes = [POINTER(CMatrix), *[c_void_p] * 3, *[c_int64] * 2, *[c_int32] * 7]
    library.quire_linear.restype = None
    for name, kind in (("attention", CAttention), ("norm", CNorm), ("rope", CRope), ("lookup", CLookup)):
        function = getattr(library, f"quire_{name}")
        function.argtypes, function.restype = [POINTER(kind), c_int32], None
    library.quire_pack_blocks.argtypes = [POINTER(CBlocks), c_void_p, c_int64, c_int64]
    library.quire_pack_blocks.restype = None
    library.quire_start.argtypes, library.quire_start.restype = [c_int32, c_void_p, c_void_p], None
    library.quire_run.argtypes, library.quire_run.restype = [c_void_p, c_int64, c_int32], None
    return library


def best_level() -> str | None:
    """The best instruction set of this processor that there are kernels for, a key of `LEVELS`."""
    library = load()
    found = -1 if library is None else int(library.quire_best())
    return next((name for name, level in LEVELS.items() if level == found), None)


def team_functions() -> tuple[int | None, int | None]:
    """The addresses of GOMP_parallel and omp_get_num_threads in the OpenMP library that torch has loaded, whose
    threads then run the kernels; None: there is none, and they run in one thread."""
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    paths = {line.split()[-1] for line in maps if "omp" in line.rpartition("/")[2] and ".so" in line}
    for path in sorted(paths):
        try:
            found = ctypes.CDLL(path)
            functions = found.GOMP_parallel, found.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        run, size = (ctypes.cast(each, c_void_p).value for each in functions)
        return run, size
    return None, None
