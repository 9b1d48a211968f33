"""ModelBuilder: what an architecture declares its layers with.

It creates layers and notes, for every checkpoint tensor, where its data goes: which fused matrix, which rows, which
part of this rank, in which format. The loader then only matches names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.layers.basic import (
    MLP,
    AnyEmbedding,
    Attention,
    Embedding,
    GatedAttention,
    GatedMLP,
    Heads,
    NormLayer,
    RopeConfig,
    Rotary,
    StoredEmbedding,
    VocabParallelEmbedding,
)
from quire.layers.delta import DeltaConfig, GatedDelta, split_by_head, split_by_kind
from quire.layers.latent import Decompression, IndexConfig, Indexer, LatentAttention, LatentConfig, QueryProjection
from quire.layers.linear import (
    ONE_RANK,
    ColumnParallelLinear,
    LMHead,
    ParallelGroup,
    RowParallelLinear,
    heads_divide,
    shard_of,
    widths_of,
)
from quire.layers.mamba import Mamba2, MambaConfig
from quire.layers.moe import Experts, MoE, MoEConfig, Router, SeparateExperts, SharedExpert, StackedExperts
from quire.layers.quantization.base import (
    Format,
    Matrix,
    MatrixPart,
    Packable,
    Plain,
    StoredFormat,
    WeightSlot,
    WeightStorage,
    bias_slots,
)
from quire.layers.quantization.deferred import Deferred
from quire.layers.quantization.gguf import GgufStorage, Tables, no_table
from quire.layers.vision import Patches, VisionConfig
from quire.ops.base import Ops
from quire.ops.operands import XIELU, DeltaWeights, ExpertBiases, Gate, Norm, Norms, ScanWeights
from quire.ops.threads import single_threads

Kind = TypeVar("Kind")

QKV = ("q_proj", "k_proj", "v_proj")
QK_NORMS = ("q_norm", "k_norm")
GATED = ("gate_proj", "up_proj", "down_proj")
"""The usual names of a layer's matrices and norms."""

INDEX_EPS = 1e-6
"""Of the norm of an indexer's keys, whatever the model's own."""


class ExpertNames(NamedTuple):
    """Names of a mixture's tensors in a layer.

    matrices: of gate, up and down, or of the one that holds gate and up, and of down; # stands for an expert's number,
    and without it one tensor holds the matrices of all experts. transposed: they are [in, out]. interleaved: rows of
    gate and of up alternate. Experts without a gate have up and down alone. shared: of the shared expert's matrices, as
    `matrices`. latent: to and from what experts read, see `MoEConfig`. apart: of gate, up and down in
    checkpoints that have no such tensor, if there are any.
    """

    router: str = "mlp.gate"
    matrices: Sequence[str] = ("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj", "mlp.experts.#.down_proj")
    transposed: bool = False
    interleaved: bool = False
    correction: str = "mlp.gate.e_score_correction_bias"
    shared: Sequence[str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    latent: Sequence[str] = ()
    gains: str = ""
    apart: Sequence[str] = ()

    def of_expert(self, number: int) -> Sequence[str]:
        """`apart` for one expert."""
        return [name.replace("#", str(number)) for name in self.apart]


USUAL_EXPERTS = ExpertNames()


class ExpertStack(NamedTuple):
    """A tensor that holds a matrix of each expert; that of expert e has slots as if its name were `name.e.weight`.

    transposed, interleaved: see `ExpertNames`.
    """

    name: str
    transposed: bool
    interleaved: bool


CONVERTERS = 16
"""Threads at most: their operations are so short that more would wait for Python's lock."""


def finalize_all(stored: Sequence[WeightStorage], device: torch.device) -> None:
    """Convert matrices to their final form. Raises the error of the first that fails."""

    @torch.inference_mode()
    def convert(each: WeightStorage) -> None:
        each.finalize()

    if device.type != "cpu" or len(stored) < 2:
        for each in stored:
            convert(each)
        return
    with single_threads(min(CONVERTERS, torch.get_num_threads()), "convert") as pool:
        for _ in pool.map(convert, stored):
            pass


class ModelBuilder:
    """Creates layers. Names given to a method are relative to `prefix`; `scope` extends it.

    slots: where each checkpoint tensor goes, by name; several places where a rank keeps several parts of it. ignored:
    patterns (fnmatch) of checkpoint names that the model does not need. skipped: those of them that an option would
    load; optional: those that it loads. renames: see `rename`. stacks: see `ExpertStack`. modules: those that the
    checkpoint has tensors of, as far as it matters under which of several names. expert_parallel: ranks have whole
    experts each, not a part of every expert. elsewhere: modules of the checkpoint that other ranks load. unpacked:
    weights that are packed after the model is ready, see `mapped.pack_beside`. defers: whether matrices may be read
    then, too, see `Deferred`.
    """

    def __init__(
        self,
        *,
        ops: Ops,
        parallel: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        format: Format = Plain,
        tables: Tables = no_table,
        expert_parallel: bool = False,
        defers: bool = False,
    ) -> None:
        self.defers = defers
        self.expert_parallel, self.pipeline = expert_parallel, parallel.pipeline
        self.elsewhere: set[str] = set()
        self.ops, self.parallel, self.dtype, self.device, self.format = ops, parallel, dtype, device, format
        self.tables = tables
        self.modules: Collection[str] = frozenset()
        self.prefix = ""
        self.slots: dict[str, list[WeightSlot]] = {}
        self.matrices: list[WeightStorage] = []
        self.embeddings: list[WeightStorage] = []
        self.unpacked: list[Packable] = []
        self.finalized: set[int] = set()
        self.unjoined: list[SeparateExperts | Decompression] = []
        self.ignored: list[str] = []
        self.skipped: list[str] = []
        self.optional: list[str] = []
        self.renames: dict[str, str] = {}
        self.stacks: list[ExpertStack] = []

    def scope(self, name: str) -> ModelBuilder:
        """The same builder with a longer prefix: `build.scope("layers.0")`."""
        inner = copy(self)
        inner.prefix = f"{self.prefix}{name}."
        return inner

    def replicated(self) -> ModelBuilder:
        """The same builder for layers that are not divided: every rank computes them as a whole, to the same bits,
        since a router that reads what follows must choose the same experts on every rank."""
        inner = copy(self)
        inner.parallel = ONE_RANK
        if self.parallel.size > 1:
            inner.ops = self.ops.untuned()
        return inner

    def here(self, present: bool, *names: str) -> ModelBuilder:
        """This builder, or where not `present`, one whose layers another stage has: they take no memory here, and
        tensors of the modules `names` are not loaded."""
        if present:
            return self
        self.ignore(*(f"{name}.*" for name in names))
        absent = copy(self)
        absent.device, absent.format, absent.tables = torch.device("meta"), Plain, no_table
        absent.slots, absent.matrices, absent.embeddings = {}, [], []
        absent.unjoined, absent.stacks = [], []
        return absent

    def each_layer(self, name: str, count: int, own: range) -> Iterator[tuple[int, ModelBuilder]]:
        """(number, builder) of the layers that this stage has of `count`. name: of the list of layers."""
        self.ignore(*(f"{name}.{i}.*" for i in range(count) if i not in own))
        for i in own:
            yield i, self.scope(f"{name}.{i}")

    def for_heads(self, heads: int, kv_heads: int) -> ModelBuilder:
        """The builder of an attention layer: this one, or `replicated` where its heads cannot be divided."""
        return self if heads_divide(heads, kv_heads, self.parallel.size) else self.replicated()

    def width(self, count: int, what: str) -> tuple[int, int]:
        """A layer's inner width as (units, numbers of each), for `column_parallel` and `row_parallel`: a unit is what
        the format of weights does not allow to cut through. Raises InvalidModel for fewer units than ranks."""
        unit, format = 1, self.format
        if isinstance(format, StoredFormat) and count % format.unit == 0:
            unit = format.unit
        if count // unit < self.parallel.size:
            raise InvalidModel(
                f"{self.prefix}{what}: a width of {count} in groups of {unit} cannot be divided among "
                f"{self.parallel.size} ranks: --tensor-parallel-size {count // unit} is the most"
            )
        return count // unit, unit

    def ignore(self, *patterns: str) -> None:
        """Note patterns of checkpoint names that are not loaded."""
        self.ignored += (self.prefix + pattern for pattern in patterns)

    def skip_drafts(self, pattern: str) -> None:
        """Note a pattern of the tensors of layers that draft, which are not loaded: see `skipped`."""
        self.ignore(pattern)
        self.skipped.append(self.prefix + pattern)

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Checkpoint names that begin with a key of `prefixes` begin here with its value."""
        self.renames.update(prefixes)
        renamed = (
            ours + name.removeprefix(p) for name in self.modules for p, ours in prefixes.items() if name[: len(p)] == p
        )
        self.modules = frozenset(renamed) | frozenset(self.modules)
        if isinstance(self.format, StoredFormat):
            self.format = self.format.renamed(prefixes)

    def finalize(self, *, late: tuple[type[WeightStorage], ...] = ()) -> None:
        """Convert every matrix to its final form once all slots are filled: one at a time, on a CPU one a thread.

        Slots are dropped first, so that a matrix's loaded tensors are freed as soon as it is converted. late: kinds of
        storage that wait for another call, and are multiplied by as they were loaded until then.
        """
        self.slots.clear()
        every = [*self.embeddings, *self.matrices]
        wanted = [i for i, each in enumerate(every) if i not in self.finalized and not isinstance(each, late)]
        first = [i for i in wanted if i < len(self.embeddings)]  # a tied head is made of one
        for some in (first, wanted[len(first) :]):
            finalize_all([every[i] for i in some], self.device)
        self.finalized.update(wanted)
        if len(self.finalized) < len(every):
            return
        for several in self.unjoined:
            several.join()
        self.unjoined.clear()

    def vector(
        self, name: str, size: int, *, mean: float = 0.0, std: float = 0.1, shift: float = 0.0, exact: bool = False
    ) -> Tensor:
        """A tensor [size], whole on every rank. shift: is added to the checkpoint's values, in float32. exact: it is
        float32, too, and may have dimensions of size 1 in the checkpoint."""
        data = torch.empty(size, dtype=torch.float32 if shift or exact else self.dtype, device=self.device)
        cut = (slice(0, size),)
        self._add_slot(
            WeightSlot(self.prefix + name, (size,), cut, data, mean=mean, std=std, shift=shift, ignore_unit_dims=exact)
        )
        return data

    def tensor(self, name: str, shape: tuple[int, ...], *, std: float = 0.1) -> Tensor:
        """A tensor of any shape, whole on every rank."""
        return self._rows(name, shape, slice(0, shape[0]), std)

    def _rows(
        self, name: str, shape: tuple[int, ...], cut: slice, std: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows `cut` of a tensor. dtype: None for the model's."""
        kept = (cut.stop - cut.start, *shape[1:])
        data = torch.empty(kept, dtype=dtype or self.dtype, device=self.device)
        cuts = (cut, *(slice(0, size) for size in shape[1:]))
        self._add_slot(WeightSlot(self.prefix + name, shape, cuts, data, std=std))
        return data

    def patches(self, name: str, config: VisionConfig, *, bias: bool, frames: bool = True) -> Patches:
        """The embedding of patches, which the checkpoint keeps as a convolution. frames: with a dimension of time."""
        shape = (config.hidden, 3, *((config.frames,) if frames else ()), config.patch, config.patch)
        weight = self.tensor(f"{name}.weight", shape, std=(shape[1] * config.patch**2) ** -0.5)
        return Patches(
            config, weight.flatten(1), self.vector(f"{name}.bias", config.hidden) if bias else None, self.ops
        )

    def vision_attention(
        self, config: VisionConfig, names: Sequence[str], out: str
    ) -> tuple[ColumnParallelLinear, RowParallelLinear]:
        """Projections of a layer of an encoder of images, with biases, whole on every rank."""
        heads, build = [(config.heads, config.head_dim)], self.replicated()
        return (
            build.column_parallel(names, config.hidden, heads * 3, bias=True),
            build.row_parallel(out, heads[0], config.hidden, bias=True),
        )

    def rms_norm(self, name: str, size: int, eps: float, *, shift: float = 0.0) -> Norm:
        """shift: what the checkpoint's weight lacks (1 for Gemma, which stores the weight less 1)."""
        return Norm(self.vector(f"{name}.weight", size, mean=1.0, shift=shift), eps)

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True, shift: float = 0.0) -> Norm:
        """shift: as of `rms_norm`. The bias has the weight's dtype."""
        weight = self.vector(f"{name}.weight", size, mean=1.0, shift=shift)
        return Norm(weight, eps, self.vector(f"{name}.bias", size, exact=bool(shift)) if bias else None, centred=True)

    def norm_layer(self, norm: Norm | None, scale: float = 1.0, gain: Tensor | None = None) -> NormLayer:
        """See `NormLayer`."""
        return NormLayer(norm, self.ops, scale, gain)

    def embedding(self, name: str, count: int, hidden: int, *, scale: float = 1.0) -> AnyEmbedding:
        """A table [count, hidden], divided by rows; its random init gives logits of standard deviation 1 when it is the
        head, too."""
        if count < self.parallel.size:
            return self.replicated().embedding(name, count, hidden, scale=scale)
        cut = shard_of(count, self.parallel, name)
        own = self._table(name, count, cut, hidden, scale)
        return own if self.parallel.size == 1 else VocabParallelEmbedding(own, cut, self.parallel)

    def _table(self, name: str, count: int, cut: slice, hidden: int, scale: float) -> Embedding | StoredEmbedding:
        """Rows `cut` of a table."""
        matrix = Matrix(
            (MatrixPart(self.prefix + name, count, cut),),
            hidden,
            slice(0, hidden),
            self.dtype,
            self.device,
            keep_precision=True,
        )
        stored = self.tables(matrix, self.ops)
        if stored is not None:
            stored = Deferred(stored) if self.defers and not isinstance(stored, GgufStorage) else stored
            for place in stored.slots():
                self._add_slot(place)
            self.embeddings.append(stored)
            return StoredEmbedding(stored, scale)
        return Embedding(self._rows(f"{name}.weight", (count, hidden), cut, hidden**-0.5), self.ops, scale)

    def rotary(self, rope: RopeConfig) -> Rotary:
        """The rotary embedding of a config."""
        return Rotary(rope, self.device, self.ops)

    def column_parallel(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[tuple[int, int]],
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> ColumnParallelLinear:
        """One matrix made of several checkpoint matrices, or of one that holds several.

        outputs: (count, rows each) of each: heads are divided between ranks, never split.
        """
        parts, whole = list[MatrixPart](), sum(count * unit for count, unit in outputs)
        together, before = len(names) == 1, 0
        for name, (count, unit) in zip(list(names) * len(outputs) if together else names, outputs, strict=True):
            cut = shard_of(count, self.parallel, name, unit)
            if together:
                parts.append(MatrixPart(self.prefix + name, whole, slice(before + cut.start, before + cut.stop)))
            else:
                parts.append(MatrixPart(self.prefix + name, count * unit, cut))
            before += count * unit
        every = slice(0, inputs)
        stored = self._store(parts, inputs, every, bias=bias, transposed=transposed, waits=True)
        return ColumnParallelLinear(stored)

    def row_parallel(
        self, name: str, inputs: tuple[int, int], outputs: int, *, bias: bool = False, transposed: bool = False
    ) -> RowParallelLinear:
        """inputs: (count, columns each)."""
        count, unit = inputs
        part = MatrixPart(self.prefix + name, outputs, slice(0, outputs))
        cut = shard_of(count, self.parallel, name, unit)
        first = self.parallel.rank == 0
        columns = count * unit
        stored = self._store([part], columns, cut, bias=bias, own_bias=first, transposed=transposed, waits=True)
        return RowParallelLinear(stored, self.parallel)

    def head(
        self,
        name: str,
        hidden: int,
        vocab: int,
        tied: AnyEmbedding | None,
        *,
        soft_cap: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
    ) -> LMHead:
        """Hidden states to logits. tied: the embedding whose table it shares."""
        cut = shard_of(vocab, self.parallel, "logits")
        part, columns = MatrixPart(self.prefix + name, vocab, cut), slice(0, hidden)
        stored: WeightStorage
        if tied is None:
            stored = self._store([part], hidden, columns, bias=bias, keep_precision=True, waits=True)
        else:
            self.ignore(f"{name}.weight")
            table = tied.table if isinstance(tied, VocabParallelEmbedding) else tied
            if isinstance(table, StoredEmbedding):
                stored = table.stored
            else:
                stored = self._store([part], hidden, columns, bias=bias, tied_weight=table.weight)
        return LMHead(stored, self.parallel, widths_of(vocab, self.parallel.size), soft_cap, scale)

    def attention(
        self,
        hidden: int,
        heads: Heads,
        *,
        names: Sequence[str] = QKV,
        out: str = "o_proj",
        bias: bool = False,
        out_bias: bool = False,
        norms: Norms | None = None,
        sinks: str = "",
        transposed: bool = False,
        kind: type[Attention] = Attention,
    ) -> Attention:
        """heads: of the whole model; this rank's share is taken here.

        names: of the checkpoint's q, k and v, or the one that holds all three; of q alone, without K/V heads. norms: of
        q and k, if any. sinks: name of the heads' sinks, see `Ops.attention`; empty for none. kind: `GatedAttention`
        where the matrix of q makes gates, too.
        """
        build = self.for_heads(heads.count, heads.kv)
        size = build.parallel.size
        own = replace(heads, count=heads.count // size, kv=max(1, heads.kv // size))
        asked = heads.dim * (2 if kind is GatedAttention else 1)
        outputs = [(heads.count, asked)] + [(heads.kv, heads.dim)] * (2 if heads.kv else 0)
        qkv = build.column_parallel(names, hidden, outputs, bias=bias, transposed=transposed)
        back = build.row_parallel(out, (heads.count, heads.dim), hidden, bias=out_bias, transposed=transposed)
        return kind(qkv, back, own, self.ops, norms, build.sinks(sinks, heads.count) if sinks else None)

    def latent_attention(
        self, hidden: int, heads: int, latent: LatentConfig, scale: float, eps: float, *, bias: bool = False
    ) -> LatentAttention:
        """heads: of the whole model. bias: of the first products and of the last, see `LatentConfig.queries`."""
        build = self.for_heads(heads, 1)
        kept, each = latent.latents + latent.rotated, latent.plain + latent.rotated
        names, outputs = ("q_proj", "kv_a_proj_with_mqa"), [(heads, each), (1, kept)]
        second = norm = None
        if latent.queries:
            names, outputs = ("q_a_proj", names[1]), [(1, latent.queries), (1, kept)]
            norm = build.rms_norm("q_a_layernorm", latent.queries, eps)
            second = build.column_parallel(("q_b_proj",), latent.queries, [(heads, each)])
        if len({build._kept_as_stored(name) for name in names}) == 1:
            first = [build.column_parallel(names, hidden, outputs, bias=bias)]
        else:
            pairs = zip(names, outputs, strict=True)
            first = [build.column_parallel((name,), hidden, [size], bias=bias) for name, size in pairs]
        project = QueryProjection(first, second, norm, self.ops, kept)
        back = build.row_parallel("o_proj", (heads, latent.value), hidden, bias=bias)
        small = build.rms_norm("kv_a_layernorm", latent.latents, eps)
        indexer = self.scope("indexer").indexer(hidden, latent.queries, latent.index) if latent.index else None
        whole = build._decompression(heads, latent)
        return LatentAttention(project, small, whole, back, latent, scale, self.ops, indexer)

    def indexer(self, hidden: int, queries: int, index: IndexConfig) -> Indexer:
        """queries: numbers that queries are made of. Whole on every rank, so that all attend to the same tokens."""
        build = self.replicated()
        return Indexer(
            build.column_parallel(("wq_b",), queries, [(index.heads, index.dim)]),
            build.column_parallel(("wk",), hidden, [(1, index.dim)]),
            build.dense("weights_proj", hidden, index.heads),
            build.layer_norm("k_norm", index.dim, INDEX_EPS),
            index,
            build.ops,
        )

    def gated_delta(self, hidden: int, config: DeltaConfig, eps: float, *, by_head: bool) -> GatedDelta:
        """A layer of the gated delta rule, whole on every rank, as its states are. by_head: how its first matrices are
        cut, see `split_by_head`."""
        build = self.replicated()
        keys, values, heads = config.key_heads * config.key, config.value_heads * config.value, config.value_heads
        sizes = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if by_head:
            sizes = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
        weights = DeltaWeights(
            convolution=self._convolution(config.channels, config.width),
            fading=self.vector("A_log", heads, exact=True),
            rise=self.vector("dt_bias", heads, exact=True),
            norm=self.rms_norm("norm", config.value, eps),
        )
        if len({build._kept_as_stored(name) for name in sizes}) == 1:
            project = [build.column_parallel(tuple(sizes), hidden, [(size, 1) for size in sizes.values()])]
        else:
            project = [build.column_parallel((name,), hidden, [(size, 1)]) for name, size in sizes.items()]
        return GatedDelta(
            project,
            tuple(sizes.values()),
            split_by_head if by_head else split_by_kind,
            weights,
            build.row_parallel("out_proj", (config.value_heads, config.value), hidden),
            config,
            self.ops,
        )

    def mamba(self, hidden: int, config: MambaConfig, eps: float) -> Mamba2:
        """A layer of Mamba 2, whole on every rank, as its states are."""
        build = self.replicated()
        weights = ScanWeights(
            convolution=self._convolution(config.channels, config.width),
            bias=self.vector("conv1d.bias", config.channels) if config.conv_bias else None,
            fading=self.vector("A_log", config.heads, exact=True),
            rise=self.vector("dt_bias", config.heads, exact=True),
            skip=self.vector("D", config.heads, exact=True),
            norm=self.rms_norm("norm", config.inner, eps),
            step_limit=config.step_limit,
        )
        sizes = ((config.inner, 1), (config.channels, 1), (config.heads, 1))
        return Mamba2(
            build.column_parallel(("in_proj",), hidden, sizes, bias=config.bias),
            weights,
            build.row_parallel("out_proj", (config.heads, config.value), hidden, bias=config.bias),
            config,
            self.ops,
        )

    def _convolution(self, channels: int, width: int) -> Tensor:
        """Weights [channels, width] of a convolution of each channel, [channels, 1, width] in the checkpoint."""
        return self.tensor("conv1d.weight", (channels, 1, width), std=width**-0.5)[:, 0]

    def _decompression(self, heads: int, latent: LatentConfig) -> Decompression:
        """`kv_b_proj`, as stored only where the checkpoint's is quantized."""
        name, unit = "kv_b_proj", latent.plain + latent.value
        part = MatrixPart(self.prefix + name, heads * unit, shard_of(heads, self.parallel, name, unit))
        build = copy(self)
        if not self._kept_as_stored(name):
            build.format = Plain
        made = Decompression(build._store([part], latent.latents, slice(0, latent.latents)), latent)
        self.unjoined.append(made)
        return made

    def _kept_as_stored(self, name: str) -> bool:
        """Whether the checkpoint's matrix is quantized, and not dequantized while it is loaded."""
        part = MatrixPart(self.prefix + name, 0, slice(0, 0))
        return isinstance(self.format, StoredFormat) and self.format.keeps([[part]], slice(0, 0))

    def sinks(self, name: str, heads: int) -> Tensor:
        """This rank's of a number for each of `heads`, float32."""
        return self._rows(name, (heads,), shard_of(heads, self.parallel, name), 1.0, torch.float32)

    def by_head(self, name: str, heads: int, dim: int) -> Tensor:
        """This rank's rows of a table [heads, dim] that has `dim` numbers for each head."""
        return self._rows(name, (heads, dim), shard_of(heads, self.parallel, name), 1.0)

    def gated_mlp(
        self, hidden: int, width: int, activation: str, *, bias: bool = False, names: Sequence[str] = GATED
    ) -> GatedMLP:
        """names: of gate, up and down; or of the one that holds gate and up, and of down."""
        *rises, down = names
        gate = activation_of(activation, GATES)
        inner = self.width(width, rises[0])
        gate_up = self.column_parallel(rises, hidden, (inner, inner), bias=bias)
        return GatedMLP(gate_up, self.row_parallel(down, inner, hidden, bias=bias), gate)

    def experts(
        self,
        hidden: int,
        mixture: MoEConfig,
        activation: str,
        *,
        names: ExpertNames = USUAL_EXPERTS,
        bias: bool = False,
    ) -> MoE:
        """A router and experts, and the expert that all tokens share. bias: of the shared expert's matrices. Experts of
        a GGUF file that differ in type are dequantized."""
        if any(self.prefix + name in self.modules for name in names.of_expert(0)):
            names = names._replace(matrices=names.apart, transposed=False, interleaved=False)
        act, biased, across = expert_gate(activation, mixture), mixture.biased, names.transposed
        width = mixture.latent or hidden
        spread = self.expert_parallel and self.parallel.size > 1
        own, cut = self._expert_shard(mixture, spread)
        whole = slice(0, width)
        every = [[self._matrix_name(name, e, names) for e in range(mixture.num_experts)] for name in names.matrices]
        self.elsewhere.update(name for matrix in every for name in (*matrix[: own.start], *matrix[own.stop :]))
        *rising, falling = (matrix[own] for matrix in every)
        rises = expert_rises(rising, mixture, cut)
        falls = [(MatrixPart(n, width, whole),) for n in falling]
        experts: Experts
        first = spread or self.parallel.rank == 0
        build, format = copy(self), self.format
        if isinstance(format, StoredFormat) and not (format.keeps(rises, whole) and format.keeps(falls, cut)):
            build.format = format.plain
        if build.format is Plain:
            rise, rise_bias = self._stacked(rises, width, whole, names, biased)
            fall, fall_bias = self._stacked(falls, mixture.width, cut, names, biased, own_bias=first)
            experts = StackedExperts(rise, fall, act, self.ops, ExpertBiases(rise_bias, fall_bias))
        else:
            gate_ups = [build._store(parts, width, whole, bias=biased, transposed=across) for parts in rises]
            downs = [
                build._store(parts, mixture.width, cut, bias=biased, own_bias=first, transposed=across)
                for parts in falls
            ]
            experts = SeparateExperts(gate_ups, downs, act, self.ops)
            self.unjoined.append(experts)
        correction = self.vector(names.correction, mixture.num_experts, exact=True) if mixture.corrected else None
        gains = self.vector(names.gains, mixture.num_experts, mean=1.0, exact=True) if mixture.gained else None
        router = Router(self.dense(names.router, hidden, mixture.num_experts, bias=biased), correction, gains)
        shared = latent = None
        if mixture.shared:
            mlp = self._shared_mlp(hidden, mixture, activation, names, bias)
            shared = SharedExpert(mlp, self.dense(names.shared_gate, hidden, 1) if mixture.gated_shared else None)
        if mixture.latent:
            into, back = names.latent
            latent = self.dense(into, hidden, width, bias=bias), self.dense(back, width, hidden, bias=bias)
        return MoE(router, experts, mixture, self.parallel, self.ops, shared, latent, own if spread else None)

    def _shared_mlp(
        self, hidden: int, mixture: MoEConfig, activation: str, names: ExpertNames, bias: bool
    ) -> GatedMLP | MLP:
        if mixture.gated:
            return self.gated_mlp(hidden, mixture.shared, activation, bias=bias, names=names.shared)
        up, down = names.shared
        return self.mlp(up, down, hidden, mixture.shared, activation, bias=bias)

    def _expert_shard(self, mixture: MoEConfig, spread: bool) -> tuple[slice, slice]:
        """The experts of this rank, and the part of their width that it has: of all a part, or some as a whole. Raises
        InvalidModel where there are fewer than ranks."""
        if not spread:
            units, unit = self.width(mixture.width, "experts")
            return slice(0, mixture.num_experts), shard_of(units, self.parallel, "expert width", unit)
        if mixture.num_experts < self.parallel.size:
            raise InvalidModel(
                f"{self.prefix}experts: {mixture.num_experts} experts cannot be spread over {self.parallel.size} "
                "ranks: leave out --enable-expert-parallel"
            )
        return shard_of(mixture.num_experts, self.parallel, "experts"), slice(0, mixture.width)

    def _matrix_name(self, name: str, expert: int, names: ExpertNames) -> str:
        """The name of an expert's matrix; one without # is noted as that of a tensor for all experts."""
        if "#" in name:
            return self.prefix + name.replace("#", str(expert))
        if not expert:
            interleaved = names.interleaved and name == names.matrices[0]
            self.stacks.append(ExpertStack(self.prefix + name, names.transposed, interleaved))
        return f"{self.prefix}{name}.{expert}"

    def dense(self, name: str, hidden: int, count: int, *, bias: bool = False) -> WeightStorage:
        """A small matrix, whole on every rank and not quantized unless the checkpoint's is."""
        part = MatrixPart(self.prefix + name, count, slice(0, count))
        return self._store([part], hidden, slice(0, hidden), bias=bias, keep_precision=True)

    def _stacked(
        self,
        experts: Sequence[Sequence[MatrixPart]],
        columns: int,
        cut: slice,
        names: ExpertNames,
        biased: bool,
        *,
        own_bias: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """One matrix of each expert in one tensor [E, rows, columns], and biases [E, rows], if any."""
        rows = sum(part.shard.stop - part.shard.start for part in experts[0])
        weight = torch.empty(len(experts), rows, cut.stop - cut.start, dtype=self.dtype, device=self.device)
        bias = torch.zeros(weight.shape[:2], dtype=self.dtype, device=self.device) if biased else None
        for e, (parts, own) in enumerate(zip(experts, weight, strict=True)):
            row = 0
            for name, height, kept in parts:
                into = own[row : row + kept.stop - kept.start]
                row += len(into)
                shape, cuts = (height, columns), (kept, cut)
                if names.transposed:
                    shape, cuts = shape[::-1], cuts[::-1]
                self._add_slot(WeightSlot(f"{name}.weight", shape, cuts, into, names.transposed, std=columns**-0.5))
            if bias is not None:
                matrix = Matrix(tuple(parts), columns, cut, self.dtype, self.device, True, adds_bias=own_bias)
                for place in bias_slots(matrix, bias[e]):
                    self._add_slot(place)
        return weight, bias

    def mlp(
        self,
        up: str,
        down: str,
        hidden: int,
        width: int,
        activation: str,
        *,
        bias: bool = True,
        transposed: bool = False,
    ) -> MLP:
        """Two matrices."""
        xielu = self._xielu() if activation == "xielu" else self.ops.relu2
        act = activation_of(
            activation,
            {
                **dict.fromkeys(GELUS, self.ops.gelu),
                "gelu": self.ops.gelu_erf,
                "relu": self.ops.relu,
                "relu2": self.ops.relu2,
                "xielu": xielu,
            },
        )
        inner = self.width(width, up)
        rise = self.column_parallel((up,), hidden, (inner,), bias=bias, transposed=transposed)
        return MLP(rise, self.row_parallel(down, inner, hidden, bias=bias, transposed=transposed), act)

    def _xielu(self) -> Callable[[Tensor], Tensor]:
        """The activation with numbers of its own."""
        self.ignore("act_fn.eps")
        names = ("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta")
        how = XIELU(*(self.vector(name, 1, mean=0.5, std=0.0, exact=True) for name in names))
        return lambda x: self.ops.xielu(x, how)

    def _store(
        self,
        parts: Sequence[MatrixPart],
        columns: int,
        cut: slice,
        *,
        bias: bool = False,
        own_bias: bool = True,
        transposed: bool = False,
        keep_precision: bool = False,
        tied_weight: Tensor | None = None,
        waits: bool = False,
    ) -> WeightStorage:
        """waits: it may be `Deferred`, since it is only multiplied by."""
        matrix = Matrix(
            tuple(parts),
            columns,
            cut,
            self.dtype,
            self.device,
            bias,
            adds_bias=own_bias,
            transposed=transposed,
            keep_precision=keep_precision,
        )
        stored = self.format(matrix, self.ops, tied_weight)
        if waits and self.defers and not isinstance(stored, GgufStorage):
            stored = Deferred(stored)
        for place in stored.slots():
            self._add_slot(place)
        self.matrices.append(stored)
        return stored

    def _add_slot(self, place: WeightSlot) -> None:
        self.slots.setdefault(place.name, []).append(place)


GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""The names under which configs mean gelu by its tanh approximation."""


CLAMPED = "clamped"
"""gpt-oss's, which no config.json names."""

GATES: Mapping[str, Gate] = MappingProxyType(
    {
        **dict.fromkeys(("silu", "swish"), "silu"),
        **dict.fromkeys(GELUS, "gelu"),
        **dict.fromkeys(("gelu", "gelu_python"), "gelu_erf"),
        "relu": "relu",
        CLAMPED: "clamped",
    }
)


def expert_gate(activation: str, mixture: MoEConfig) -> Gate:
    """What experts do between their products. Raises InvalidModel for an unknown activation."""
    without: Mapping[str, Gate] = {"relu2": "relu2"}
    return activation_of(activation, GATES if mixture.gated else without)


def expert_rises(rising: Sequence[Sequence[str]], mixture: MoEConfig, cut: slice) -> list[tuple[MatrixPart, ...]]:
    """Parts of each expert's first product, of this rank. rising: names of gate and up by expert, or of what holds
    both; or of up alone."""
    if not mixture.gated:
        return [(MatrixPart(up, mixture.width, cut),) for up in rising[0]]
    # Where one matrix holds gate and up, up begins after the rows of gate.
    both = len(rising) == 1
    rows = 2 * mixture.width if both else mixture.width
    up = slice(mixture.width + cut.start, mixture.width + cut.stop) if both else cut
    return [
        (MatrixPart(gate, rows, cut), MatrixPart(other, rows, up))
        for gate, other in zip(rising[0], rising[-1], strict=True)
    ]


def activation_of(name: str, known: Mapping[str, Kind]) -> Kind:
    """An activation by its name in a config. Raises InvalidModel for an unknown one."""
    if name not in known:
        names = [each for each in known if each != CLAMPED]
        raise InvalidModel(f"activation {name!r} is not supported (known: {', '.join(names)}).{nearest(name, names)}")
    return known[name]
