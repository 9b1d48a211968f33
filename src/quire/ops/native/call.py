"""Arguments of native kernels, made of tensors and of objects of `ops.operands`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from quire.ops.native.library import CAttention, CMatrix, CNorm, CRope
from quire.ops.operands import Norm, Norms, Scores
from quire.ops.panels import PanelMatrix
from quire.ops.ragged import LayerKV

GATES: Mapping[str, int] = MappingProxyType({"": 0, "silu": 1, "gelu": 2})
"""Numbers of the gate functions that native products apply, by name."""

FLOATS = (torch.float32, torch.bfloat16)

MOST_DIM, MOST_KEY_DIM = 1024, 512
"""Largest head dimensions of the kernels: of RoPE, and of keys in attention."""


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's data; None without a tensor."""
    return None if x is None else x.data_ptr()


def by_heads(norms: Norms, dim: int) -> bool:
    """Whether the RoPE kernel supports these norms: of each head of q and k, before RoPE, in one dtype."""
    weights = (norms.q.weight, norms.k.weight)
    alike = weights[0].dtype is weights[1].dtype and weights[0].dtype in FLOATS
    plain = not norms.after_rope and norms.v_eps is None and not norms.q.centred and not norms.k.centred
    return alike and plain and all(len(weight) == dim for weight in weights)


def handle_of(matrix: PanelMatrix) -> ctypes.Array[CMatrix]:
    """The C struct of a matrix, made once."""
    if matrix.handle is None:
        made = CMatrix(
            matrix.outputs,
            matrix.padded,
            matrix.weight.shape[1],
            matrix.head,
            matrix.kind,
            matrix.group,
            matrix.scale_kind,
            matrix.zero is not None,
            matrix.weight.data_ptr(),
            *(address(part) for part in (matrix.scale, matrix.zero, matrix.values)),
        )
        matrix.handle = ctypes.pointer(made)
    return cast("ctypes.Array[CMatrix]", matrix.handle)


def reads(norm: Norm) -> bool:
    """Whether the kernel supports the dtypes of a norm: weight and bias have the same one."""
    return norm.weight.dtype in FLOATS and (norm.bias is None or norm.bias.dtype is norm.weight.dtype)


def norm_call(x: Tensor, residual: Tensor | None, out: Tensor, norm: Norm, rows: int, scale: float) -> CNorm:
    """Arguments of the norm kernel for the first `rows` rows of x, residual and out, contiguous [R, hidden]."""
    return CNorm(
        x.data_ptr(),
        address(residual),
        out.data_ptr(),
        norm.weight.data_ptr(),
        address(norm.bias),
        rows,
        x.shape[-1],
        norm.eps,
        scale,
        x.dtype is torch.bfloat16,
        norm.weight.dtype is torch.bfloat16,
        norm.centred,
    )


def rope_call(
    qkv: Tensor,
    q: Tensor,
    kv: LayerKV,
    slots: Tensor,
    angles: tuple[Tensor, Tensor, bool],
    norms: Norms | None,
    *,
    rows: int,
    width: int,
    heads: int,
) -> CRope:
    """Arguments of the RoPE kernel: from the first `rows` rows of qkv, contiguous [R, width], to q [R, heads * D] and
    the K/V cache at `slots`.

    angles: cosines, sines, and whether pairs are neighbours.
    """
    cos, sin, interleaved = angles
    dim = kv.k.shape[3]
    first, second = (None, None) if norms is None else (norms.q, norms.k)
    return CRope(
        qkv.data_ptr(),
        q.data_ptr(),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        slots.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if first is None else first.weight.data_ptr(),
        None if second is None else second.weight.data_ptr(),
        rows,
        heads,
        (width // dim - heads) // 2,
        dim,
        cos.shape[-1],
        kv.k.shape[2],
        width,
        0.0 if first is None else first.eps,
        0.0 if second is None else second.eps,
        qkv.dtype is torch.bfloat16,
        first is not None and first.weight.dtype is torch.bfloat16,
        interleaved,
    )


def attention_call(
    q: Tensor,
    out: Tensor,
    kv: LayerKV,
    spans: tuple[Tensor, Tensor, Tensor],
    count: int,
    how: Scores,
    most: int,
) -> CAttention:
    """Arguments of the attention kernel: q [T, H, D] -> out. spans: query starts, K/V lengths and block table of
    `count` spans; those of more than `most` queries are skipped."""
    query_start, kv_len, page_table = spans
    return CAttention(
        q.data_ptr(),
        out.data_ptr(),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        query_start.data_ptr(),
        kv_len.data_ptr(),
        page_table.data_ptr(),
        address(how.sinks),
        count,
        q.shape[1],
        kv.k.shape[1],
        q.shape[2],
        kv.v.shape[-1],
        kv.k.shape[2],
        page_table.stride(0),
        q.stride(0),
        how.window,
        how.chunk,
        most,
        how.scale,
        how.soft_cap,
        q.dtype is torch.bfloat16,
        kv.k.dtype is torch.bfloat16,
    )
