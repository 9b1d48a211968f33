"""A tiny attention model over paged K/V, and its dense twin: any misplaced page, stale slot or wrong position shows.

Weights are random and in double precision, so that the two agree to the last token whatever the shapes of their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from quire.ops.ragged import KVShape, LayerKV, RaggedBatch

VOCAB, HIDDEN, LAYERS, HEADS, DIM = 61, 16, 2, 2, 8
POISON = VOCAB - 1
"""A token whose every hidden state is NaN."""


class Tiny:
    """forward and logits as `quire.models.registry.Model`; `dense` is the same without pages."""

    def __init__(self, seed: int = 0, context: int = 256) -> None:
        draw = torch.Generator().manual_seed(seed)
        make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        self.spec = SimpleNamespace(
            vocab=VOCAB,
            kv_shapes=(KVShape(HEADS, DIM, DIM),) * LAYERS,
            state_shapes=(),
            token_types=1,
            bidirectional=False,
            generates=True,
            near=0,
        )
        self.embedding, self.position = make(VOCAB, HIDDEN), 0.5 * make(context, HIDDEN)
        self.embedding[POISON] = torch.nan
        self.qkv = [make(HIDDEN, 3 * HEADS * DIM) / 4 for _ in range(LAYERS)]
        self.out = [make(HEADS * DIM, HIDDEN) for _ in range(LAYERS)]
        self.head = make(HIDDEN, VOCAB)
        self.fed = 0
        self.scored = 0

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        self.fed += len(batch.tokens)
        start = batch.query_start.tolist()
        x = self.embedding[batch.tokens] + self.position[batch.positions]
        for layer, (k, v) in enumerate((each.k, each.v) for each in kv):
            q, new_k, new_v = self._project(layer, x)
            page, at = batch.slots // batch.page_size, batch.slots % batch.page_size
            k[page, :, at], v[page, :, at] = new_k, new_v
            seen = x.new_zeros(len(x), HEADS * DIM)  # padding sees nothing
            for s, length in enumerate(batch.kv_len.tolist()):
                place = torch.arange(length)
                pages = batch.page_table[s].long()[place // batch.page_size]
                own = slice(start[s], start[s + 1])
                at = place % batch.page_size
                seen[own] = self._attend(q[own], k[pages, :, at], v[pages, :, at])
            x = torch.tanh(x + seen @ self.out[layer])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        assert len(hidden)  # kernels have no tiles for no rows
        self.scored = max(self.scored, len(hidden))
        return self._score(hidden)

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), V]: logits after each prefix."""
        return self._score(self.states(tokens))

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), H]: the hidden states that `forward` gives."""
        ids = torch.tensor(tokens)
        x = self.embedding[ids] + self.position[: len(tokens)]
        for layer in range(LAYERS):
            q, k, v = self._project(layer, x)
            x = torch.tanh(x + self._attend(q, k, v) @ self.out[layer])
        return x

    def _score(self, hidden: Tensor) -> Tensor:
        logits = (hidden @ self.head).float()
        logits[:, POISON] -= 100.0  # fed on purpose only
        return logits

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x @ self.qkv[layer]).view(len(x), 3, HEADS, DIM).unbind(1)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, D] are the last n of k's and v's [L, H, D] positions."""
        scores = torch.einsum("qhd,khd->hqk", q, k)
        later = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1)
