"""A decoder that ONNX Runtime runs, in the pages and among the rows of the CPU executor: the model of a LocalExecutor.

Pools are bound as input and as output of the same memory, so a step writes its rows in place and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.models.spec import ModelSpec
from quire.ops.paged_attention import PagedAttentionMetadata, SpanGroup
from quire.ops.ragged import LayerKV, RaggedBatch

Ints = npt.NDArray[np.int64]


class OnnxModel:
    """See `models.registry.Model`. folder: of `quire export-onnx`. threads: of each operator."""

    dtype = torch.float32
    classify = None

    def __init__(self, folder: Path, spec: ModelSpec, threads: int) -> None:
        self.spec = spec
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.body, self.head = (
                onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
                for name in ("body.onnx", "head.onnx")
            )
        except Exception as error:  # its errors have no base of their own
            raise InvalidModel(f"{folder.name} is not what export-onnx writes: {str(error).splitlines()[0]}") from error
        self.binding = self.body.io_binding()
        self.bound: Sequence[LayerKV] = ()

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Hidden states [N, H]; one run for each group of spans of one length, so that only keys are padded."""
        if kv is not self.bound:
            self._bind_pools(kv)
        paged = PagedAttentionMetadata.of(batch)
        hidden = torch.empty(len(batch.tokens), self.spec.hidden)
        for group in paged.groups:
            hidden[group.rows] = self._run(paged, group)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H]."""
        (logits,) = self.head.run(None, {"hidden": hidden.numpy()})
        return torch.from_numpy(logits)

    def _run(self, paged: PagedAttentionMetadata, group: SpanGroup) -> Tensor:
        heads, size, n = self.spec.kv_heads, paged.page_size, group.n
        kv_len, spans = group.kv_len.numpy().astype(np.int64), len(group.kv_len)
        place = np.arange(group.longest)
        within = place < kv_len[:, None]
        page = group.pages.numpy()[:, place // size]
        slot = np.where(
            within, page * heads * size + place % size, page[:, :1] * heads * size
        )  # past its end, its first
        head = np.arange(heads) * size
        keys = slot[:, None, :] + head[None, :, None]
        written = paged.slots[group.rows].numpy()
        rows = (written // size * heads * size + written % size)[:, None] + head
        reach = kv_len[:, None, None] - n + np.arange(n)[:, None]
        mask = np.where(place <= reach, np.float32(0), np.float32(-np.inf))
        mask = np.tile(mask, (1, self.spec.heads // heads, 1))[:, None]
        out = torch.empty(spans, n, self.spec.hidden)
        shape = (spans, n)
        self._bind("tokens", paged.tokens[group.rows].numpy().reshape(shape))
        self._bind("positions", paged.positions[group.rows].numpy().reshape(shape))
        self._bind("rows", rows.reshape(-1, 1))
        self._bind("keys", keys)
        self._bind("mask", mask)
        self.binding.bind_output("hidden", "cpu", 0, np.float32, tuple(out.shape), out.data_ptr())
        self.body.run_with_iobinding(self.binding)
        return out.view(-1, self.spec.hidden)

    def _bind(self, name: str, value: npt.NDArray[np.generic]) -> None:
        self.binding.bind_cpu_input(name, np.ascontiguousarray(value))

    def _bind_pools(self, kv: Sequence[LayerKV]) -> None:
        for i, layer in enumerate(kv):
            for name, pool in (("k", layer.k), ("v", layer.v)):
                shape = (pool.numel() // pool.shape[-1], pool.shape[-1])
                for bind, what in (
                    (self.binding.bind_input, f"{name}.{i}"),
                    (self.binding.bind_output, f"{name}.{i}.out"),
                ):
                    bind(what, "cpu", 0, np.float32, shape, pool.data_ptr())
        self.bound = kv
