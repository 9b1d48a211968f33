"""RaggedBatches for tests: spans laid over shuffled pages, as an executor would have left them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.ragged import LayerKV, RaggedBatch, StateSlots


class Pages:
    """A pool whose pages go to sequences in random order; block 0 is the null block."""

    def __init__(self, count: int, size: int, seed: int = 0) -> None:
        self.size = size
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free = order.tolist()
        self.held: dict[int, list[int]] = {}

    def reach(self, sequence: int, length: int) -> list[int]:
        """The pages of a sequence, grown to hold `length` tokens."""
        held = self.held.setdefault(sequence, [])
        while len(held) * self.size < length:
            held.append(self.free.pop())
        return held

    def batch(self, spans: list[tuple[int, int, list[int]]], spare: int = 0) -> RaggedBatch:
        """spans: (sequence, tokens computed before, tokens fed now). spare: columns more than any span needs."""
        tables = [self.reach(sequence, past + len(fed)) for sequence, past, fed in spans]
        width = max(map(len, tables)) + spare
        positions = [past + i for _, past, fed in spans for i in range(len(fed))]
        slots = [
            table[(past + i) // self.size] * self.size + (past + i) % self.size
            for table, (_, past, fed) in zip(tables, spans, strict=True)
            for i in range(len(fed))
        ]
        counts = torch.tensor([0, *(len(fed) for _, _, fed in spans)])
        lengths = [past + len(fed) for _, past, fed in spans]
        return RaggedBatch(
            tokens=torch.tensor([token for _, _, fed in spans for token in fed], dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_start=counts.cumsum(0).to(torch.int32),
            kv_len=torch.tensor(lengths, dtype=torch.int32),
            page_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            page_size=self.size,
            max_query=max(len(fed) for _, _, fed in spans),
            max_kv=max(lengths),
            states=self.states(spans),
        )

    @staticmethod
    def states(spans: list[tuple[int, int, list[int]]]) -> StateSlots:
        """Each sequence has a slot of its own."""
        targets = [0 if i < len(fed) - 1 else 1 + s for s, _, fed in spans for i in range(len(fed))]
        source = torch.tensor([1 + s if past else 0 for s, past, _ in spans])
        return StateSlots(source, torch.tensor(targets), torch.zeros(len(targets), dtype=torch.int64))


def poisoned(
    pages: int,
    heads: int,
    size: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    value_dim: int = 0,
    index_dim: int = 0,
) -> LayerKV:
    """A pool of NaN: whatever is read before it is written shows in the result. value_dim: 0 for `dim`. index_dim: 0
    for no keys of an indexer."""

    def pool(dim: int) -> Tensor:
        return torch.full((pages, heads, size, dim), float("nan"), dtype=dtype)

    return LayerKV(pool(dim), pool(value_dim or dim), index=pool(index_dim) if index_dim else None)
