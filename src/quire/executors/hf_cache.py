"""How the past of a transformers model is kept between steps: K/V in the scheduler's blocks, states of recurrent layers
by sequence, or, where neither is known, whatever the model keeps, sequence by sequence.

`PagedCache` hands a group of sequences to the model as one cache whose keys are aligned at their ends: a shorter
sequence has columns in front that its attention mask leaves out, as transformers pads prompts. A column in front reads
the sequence's own first position, so that nothing foreign and nothing unwritten is multiplied, even by 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from quire.errors import StepFailed
from quire.model_runner.memory import LayerShape
from quire.ops.ragged import LayerKV, RaggedBatch


class Feed(Protocol):
    """What feeds a model: see `HfModel.__call__`. model: of transformers. device: of its embeddings."""

    model: Any
    device: torch.device

    def __call__(self, tokens: Tensor, kept: Sequence[int] | None = None, **past: Any) -> Any:
        """The model's answer to tokens [S, n]."""


@dataclass(frozen=True, slots=True)
class Places:
    """Spans of `n` tokens each that are fed in one forward.

    tokens, positions [S, n]. slots [S * n]: where K/V is written. starts: of the spans in the batch. lengths [S] int64:
    tokens of each sequence with this step's. columns [S, longest]: slots of keys, aligned at their ends. mask
    [S, longest]: 1 where a column is a position. blocks: the first of each sequence.
    """

    n: int
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: list[int]
    lengths: Tensor
    columns: Tensor
    mask: Tensor
    blocks: list[int]
    rows: dict[tuple[int, torch.device, bool], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: RaggedBatch, spans: Sequence[int], n: int) -> Places:
        """The places of some spans of a batch."""
        chosen = torch.tensor(spans, device=batch.tokens.device)
        starts = batch.query_start.long()[chosen]
        rows = starts[:, None] + torch.arange(n, device=starts.device)
        lengths = batch.kv_len.long()[chosen]
        longest = int(lengths.max())
        position = torch.arange(longest, device=starts.device) - (longest - lengths)[:, None]
        real = position.clamp(min=0)
        table, size = batch.page_table.long()[chosen], batch.page_size
        columns = table.gather(1, real // size) * size + real % size
        return cls(
            n,
            batch.tokens[rows],
            batch.positions[rows],
            batch.slots[rows].flatten(),
            starts.tolist(),
            lengths,
            columns,
            (position >= 0).long(),
            table[:, 0].tolist(),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with this step's."""
        return self.columns.shape[1]

    @property
    def past(self) -> list[int]:
        """Tokens of each sequence before this step."""
        return [length - self.n for length in self.lengths.tolist()]

    def pool_rows(self, heads: int, size: int, device: torch.device, *, written: bool) -> Tensor:
        """Rows of a pool [N * heads * size, D]: [S * n * heads] written, or [S * heads * longest] read."""
        key = heads, device, written
        if key not in self.rows:
            slots = self.slots if written else self.columns
            first = slots // size * (heads * size) + slots % size
            head = torch.arange(0, heads * size, size, device=slots.device)
            each = first[:, None] + head if written else first[:, None, :] + head[:, None]
            self.rows[key] = each.flatten().to(device)
        return self.rows[key]

    def token(self, i: int) -> Places:
        """The same spans with the token at offset `i` alone; sequences end there."""
        cut = self.longest - (self.n - 1 - i)
        at = slice(i, i + 1)
        slots = self.slots.view(-1, self.n)[:, at].flatten()
        return Places(
            1,
            self.tokens[:, at],
            self.positions[:, at],
            slots,
            [start + i for start in self.starts],
            self.lengths - (self.n - 1 - i),
            self.columns[:, :cut],
            self.mask[:, :cut],
            self.blocks,
        )


class Past(ABC):
    """The past of every sequence. feed_model: see `HfModel.__call__`.

    layers: of K/V that is kept in blocks. whole: a block must hold a whole sequence. about: for the log.
    """

    layers: tuple[LayerShape, ...] = ()
    whole: bool = True
    about: str = ""

    @classmethod
    @abstractmethod
    def variants(cls, feed_model: Feed) -> Iterator[Past]:
        """The ways there are of keeping it so for this model, the best first."""

    @abstractmethod
    def feed(self, places: Places, kv: Sequence[LayerKV], kept: Sequence[int]) -> Tensor:
        """Feed a group: logits [S, kept, V], undefined where `kept` is empty. Raises StepFailed for a lost past."""

    def kind(self, past: int) -> int:
        """Sequences of one kind can be fed together, by how many tokens they have been fed."""
        return 0

    @abstractmethod
    def reset(self) -> None:
        """Forget every sequence."""


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """K/V of one layer of a group, in blocks."""

    is_sliding = False

    def __init__(self, kv: LayerKV, places: Places) -> None:
        super().__init__()
        self.kv, self.places = kv, places
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The pool is there already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [S, G, n, D], and read those of every position: [S, G, longest, D]."""
        return self._exchange(self.kv.k, key_states), self._exchange(self.kv.v, value_states)

    def _exchange(self, pool: Tensor, new: Tensor) -> Tensor:
        _, heads, size, dim = pool.shape
        rows = pool.view(-1, dim)
        written = self.places.pool_rows(heads, size, pool.device, written=True)
        rows.index_copy_(0, written, new.transpose(1, 2).reshape(-1, dim).to(pool.dtype))
        found = rows.index_select(0, self.places.pool_rows(heads, size, pool.device, written=False))
        return found.view(len(new), heads, -1, dim).to(new.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of keys, and where they begin."""
        return self.places.longest, 0

    def get_seq_length(self) -> int:
        """Columns before this step's."""
        return self.places.longest - self.places.n

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with a recurrent state and K/V."""

    def __init__(self, kv: LayerKV, places: Places, number_of_states: int) -> None:
        PagedLayer.__init__(self, kv, places)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


STATES = ("conv_states", "recurrent_states")
"""Attributes of `LinearAttentionLayer` with a tensor [S, ...] by index."""
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
"""Its attributes with what is the same for every sequence that has been fed."""


class PagedCache(Past):
    """K/V of all layers in the scheduler's blocks; states of recurrent layers by the sequence's first block.

    There are as many `kinds` as layers: what transformers' own cache has there.
    """

    def __init__(self, feed_model: Feed, made: DynamicCache, *, singly: bool) -> None:
        self.feed_model, self.singly = feed_model, singly
        self.kinds = list(made.layers)
        self.linear = [i for i, kind in enumerate(self.kinds) if isinstance(kind, LinearAttentionLayer)]
        self.held = [i for i, kind in enumerate(self.kinds) if isinstance(kind, CacheLayerMixin)]
        self.layers = tuple(layer_shape(self.kinds[i]) for i in self.held)
        self.whole = bool(self.linear)
        self.states: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.about = "K/V is kept in blocks"
        if self.linear:
            self.about += ", recurrent states by sequence, and prefixes are not cached"
        if singly:
            self.about += "; chunks after the first are fed token by token"

    @classmethod
    def variants(cls, feed_model: Feed) -> Iterator[Past]:
        """Chunks at once, or token by token; none for a cache with layers of other kinds."""
        made = DynamicCache(config=feed_model.model.config)
        feed_model(torch.zeros(1, 2, dtype=torch.int64), **cache_arguments(made), use_cache=True)
        plain = all(
            isinstance(each, LinearAttentionLayer)
            # What keeps nothing; transformers has had a class for it since 5.21 only.
            or type(each).__name__ == "DummyLayer"
            or (isinstance(each, DynamicLayer) and not hasattr(each, "update_indexer"))
            for each in made.layers
        )
        if plain and any(isinstance(each, CacheLayerMixin | LinearAttentionLayer) for each in made.layers):
            yield cls(feed_model, made, singly=False)
            yield cls(feed_model, made, singly=True)

    def kind(self, past: int) -> int:
        """A sequence without a past has no state to go on from."""
        return int(bool(self.linear) and past > 0)

    def feed(self, places: Places, kv: Sequence[LayerKV], kept: Sequence[int]) -> Tensor:
        """One forward for all, or one for each token of a chunk after the first."""
        if not self.singly or places.n == 1 or not all(places.past):
            return self._feed(places, kv, kept)
        made = [self._feed(places.token(i), kv, [0] if i in kept else []) for i in range(places.n)]
        return torch.cat([made[i][:, :1] for i in kept], 1) if kept else made[-1]

    def _feed(self, places: Places, kv: Sequence[LayerKV], kept: Sequence[int]) -> Tensor:
        cache = Cache(layers=self._cache_layers(places, kv))
        device = self.feed_model.device
        given: dict[str, Any] = {"position_ids": places.positions.to(device), **cache_arguments(cache)}
        if self.held:
            # Without K/V there are no columns, and no spans of different length, to mask.
            given["attention_mask"] = places.mask.to(device)
        output = self.feed_model(places.tokens, kept, use_cache=True, **given)
        self._keep(places, cache)
        logits: Tensor = output.logits
        return logits

    def _cache_layers(self, places: Places, kv: Sequence[LayerKV]) -> list[Any]:
        """The layers of a group's cache."""
        pools = dict(zip(self.held, kv, strict=True))
        made = list[Any]()
        for i, kind in enumerate(self.kinds):
            if i not in pools:
                states = {"number_of_states": kind.number_of_states} if i in self.linear else {}
                made.append(type(kind)(**states))
            elif i in self.linear:
                made.append(PagedHybridLayer(pools[i], places, kind.number_of_states))
            else:
                made.append(PagedLayer(pools[i], places))
        if self.linear and places.past[0]:
            found = [self._state(block, past) for block, past in zip(places.blocks, places.past, strict=True)]
            for j, i in enumerate(self.linear):
                stack_states(made[i], [each[j] for each in found])
        return made

    def _state(self, block: int, past: int) -> list[dict[str, Any]]:
        fed, state = self.states.get(block, (0, []))
        if fed != past:
            raise StepFailed(f"block {block} holds the state after {fed} tokens, not {past}")
        return state

    def _keep(self, places: Places, cache: Cache) -> None:
        """Keep the states of recurrent layers by the sequences' blocks."""
        if not self.linear:
            return
        for s, (block, length) in enumerate(zip(places.blocks, places.lengths.tolist(), strict=True)):
            self.states[block] = length, [sequence_state(cache.layers[i], s) for i in self.linear]

    def reset(self) -> None:
        """Forget the states; blocks are the pool's."""
        self.states.clear()


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What forwards call their cache, and their outputs too: the first since transformers 5.24."""


def cache_arguments(cache: Any) -> dict[str, Any]:
    """A cache by every name that models have for it."""
    return dict.fromkeys(CACHE_NAMES, cache)


def layer_shape(layer: Any) -> LayerShape:
    """The shape of a cache layer that has been filled."""
    return LayerShape(
        layer.keys.shape[1],
        layer.keys.shape[-1],
        layer.values.shape[-1],
        torch.promote_types(layer.keys.dtype, layer.values.dtype),
        device=str(layer.keys.device),
    )


def stack_states(layer: Any, states: Sequence[dict[str, Any]]) -> None:
    """Set a recurrent layer's states from those of each sequence."""
    for name in FLAGS:
        setattr(layer, name, dict(states[0][name]))
    for name in STATES:
        each = [state[name] for state in states]
        setattr(
            layer, name, {i: None if t is None else torch.cat([one[i] for one in each]) for i, t in each[0].items()}
        )
    layer.device, layer.dtype = states[0]["place"]


def sequence_state(layer: Any, s: int) -> dict[str, Any]:
    """What a recurrent layer holds of sequence `s` of a group."""
    state: dict[str, Any] = {name: dict(getattr(layer, name)) for name in FLAGS}
    for name in STATES:
        state[name] = {i: None if t is None else t[s : s + 1].clone() for i, t in getattr(layer, name).items()}
    state["place"] = layer.device, layer.dtype
    return state


class OneByOne(Past):
    """What the model keeps by itself, of one sequence after another, by the sequence's block.

    keeps: whether it keeps anything; otherwise all tokens are fed again in each step. singly: whether a chunk after the
    first is fed token by token.
    """

    def __init__(self, feed_model: Feed, *, keeps: bool, singly: bool) -> None:
        self.feed_model, self.keeps, self.singly = feed_model, keeps, singly
        self.tokens: dict[int, Tensor] = {}
        self.caches: dict[int, Any] = {}
        self.about = "sequences are computed one after another, each with the model's own cache"
        if singly:
            self.about += ", chunks after the first token by token"
        if not keeps:
            self.about = "it keeps nothing between steps, so each step computes every sequence from its beginning"

    @classmethod
    def variants(cls, feed_model: Feed) -> Iterator[Past]:
        """Chunks at once, token by token, or everything again."""
        yield cls(feed_model, keeps=True, singly=False)
        yield cls(feed_model, keeps=True, singly=True)
        yield cls(feed_model, keeps=False, singly=False)

    def feed(self, places: Places, kv: Sequence[LayerKV], kept: Sequence[int]) -> Tensor:
        """One forward a sequence, or a token."""
        every = zip(places.blocks, places.tokens, places.past, strict=True)
        return torch.cat([self._feed(block, tokens, past, kept) for block, tokens, past in every])

    def _feed(self, block: int, tokens: Tensor, past: int, kept: Sequence[int]) -> Tensor:
        known = self.tokens.get(block, tokens[:0]) if past else tokens[:0]
        if len(known) != past:
            raise StepFailed(f"block {block} holds {len(known)} tokens, not {past}")
        self.tokens[block] = torch.cat([known, tokens])
        if not self.keeps:
            output = self.feed_model(self.tokens[block][None], [past + i for i in kept], use_cache=False)
            return output.logits  # type: ignore[no-any-return]
        pieces = [tokens] if not past or not self.singly else [tokens[i : i + 1] for i in range(len(tokens))]
        made, at = list[Tensor](), 0
        for piece in pieces:
            here = [i - at for i in kept if at <= i < at + len(piece)]
            made.append(self._continue(block, piece, past + at, here)[:, : len(here)])
            at += len(piece)
        return torch.cat(made, 1)

    def _continue(self, block: int, tokens: Tensor, past: int, kept: Sequence[int]) -> Tensor:
        cache = self.caches.get(block) if past else None
        if not past:
            self.caches.pop(block, None)
        output = self.feed_model(tokens[None], kept, use_cache=True, state=cache, **cache_arguments(cache))
        self.caches[block] = next(
            (output[name] for name in (*CACHE_NAMES, "state") if output.get(name) is not None), None
        )
        logits: Tensor = output.logits
        return logits

    def reset(self) -> None:
        """Forget every sequence."""
        self.tokens.clear()
        self.caches.clear()
