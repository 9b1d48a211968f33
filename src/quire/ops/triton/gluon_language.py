"""What kernels in Gluon, Triton's language of explicit layouts, share."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from quire.ops.triton import launch

wait, release = gluon.jit(launch.wait.fn), gluon.jit(launch.release.fn)
# Named otherwise before Triton 3.7.
barrier = gl.constexpr(getattr(gl, "barrier", None) or gl.thread_barrier)
copy = gl.constexpr(getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared)
reinterpret = gl.constexpr(
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
copy_tile = gl.constexpr(getattr(tma, "async_load", None) or tma.async_copy_global_to_shared)

LEAST = (8, 0)
"""The first compute capability whose matrix units multiply bfloat16."""
