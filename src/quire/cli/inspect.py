"""`quire inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from quire.assembly import extra
from quire.assembly.engine import choose_executor, choose_ops
from quire.assembly.place import place_of
from quire.assembly.speculate import wants_mtp
from quire.assembly.text import Text, build_text
from quire.assembly.tokenizer import build_tokenizer, hf_overrides, pooler_of, word_ids
from quire.cli.tables import print_pairs
from quire.config import Settings
from quire.config.option import amount
from quire.errors import InvalidModel
from quire.layers.basic import RopeConfig
from quire.model_runner.memory import LayerShape, block_bytes, layer_shapes
from quire.models.registry import idle_parameters, parameters, read_spec
from quire.models.spec import ModelSpec
from quire.ops.base import Ops
from quire.tokenization.tokenizer import Tokenizer
from quire.types import UNLIMITED
from quire.weights.files import Checkpoint, read_config
from quire.weights.gguf import KINDS
from quire.weights.load import check_tensors, choose_dtype, entries_by_slot, open_checkpoint
from quire.weights.locate import check as holds_a_model
from quire.weights.outline import ModelOutline
from quire.weights.pooling import GENERATES, PoolerConfig, overridden
from quire.weights.schemes import read_scheme

Fact = tuple[str, str]


class ModelFacts(NamedTuple):
    """A model's headers. trouble: why it could not be loaded, empty where it could. dtype: of activations.

    parameters: how many. layers: K/V by layer, None where that is known once it is loaded. foreign: transformers runs
    it. whole: its K/V is kept by sequence, not in blocks. pooler: how prompts become vectors. draft_parameters: of its
    layers for multi-token prediction, which `parameters` has where it is asked for.
    """

    folder: Path
    config: Mapping[str, Any]
    spec: ModelSpec
    checkpoint: Checkpoint | None
    trouble: str
    dtype: torch.dtype
    parameters: int
    layers: tuple[LayerShape, ...] | None
    foreign: bool = False
    whole: bool = False
    pooler: PoolerConfig = GENERATES
    draft_parameters: int = 0


def read_facts(settings: Settings) -> ModelFacts:
    """Raises InvalidModel where not even config.json can be read."""
    model, folder = settings.model, place_of(settings)
    holds_a_model(folder)
    config = read_config(folder)
    if choose_executor(settings) == "hf":
        return foreign_facts(settings, folder, config)
    pooler = pooler_of(settings)
    config = overridden(config, hf_overrides(settings)) | ({"num_labels": 1, "id2label": None} if pooler.words else {})
    spec = read_spec(config, pools=not pooler.generates, mtp=wants_mtp(settings)).for_length(model.max_model_len)
    checkpoint, trouble = None, ""
    try:
        words = None if pooler.words is None else word_ids(pooler.words, build_tokenizer(settings))
        checkpoint = open_checkpoint(folder, words)
        check(config, spec, checkpoint, model.quantization)
    except InvalidModel as error:
        trouble = str(error)
    dtype = choose_dtype(model.dtype, spec, checkpoint, torch.device("cpu"), packed=keeps_packed(settings))
    kept = layer_shapes(spec.kv_shapes, dtype, spec.state_shapes)
    return ModelFacts(
        *(folder, config, spec, checkpoint, trouble, dtype, parameters(spec), kept),
        pooler=pooler,
        draft_parameters=draft_parameters(config),
    )


def draft_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the layers for multi-token prediction, 0 for a model without any."""
    try:
        return parameters(read_spec(config, mtp=True)) - parameters(read_spec(config))
    except InvalidModel:
        return 0


def planned_ops(settings: Settings) -> Ops | None:
    """The operations of a model that is loaded so; None for a GPU's, which may not be here."""
    how = settings.execution
    if how.device == "cuda" or (how.device == "auto" and torch.cuda.is_available()):
        return None
    return choose_ops(torch.device("cpu"), how.deterministic, kernels=how.cpu_kernels)


def keeps_packed(settings: Settings) -> bool:
    """Whether kernels multiply quantized blocks as they are stored, see `choose_dtype`: a GPU's do."""
    ops = planned_ops(settings)
    return ops is None or ops.multiplies_integers


def foreign_facts(settings: Settings, folder: Path, config: Mapping[str, Any]) -> ModelFacts:
    """Of a model that transformers runs, built by it without weights. Raises InvalidModel."""
    checkpoint, trouble = None, ""
    try:
        checkpoint = Checkpoint(folder)
    except InvalidModel as error:
        trouble = str(error)
    named = settings.model.dtype if settings.model.dtype != "auto" else str(config.get("dtype") or "float32")
    dtype = getattr(torch, named.removeprefix("torch."))
    drawn = extra("quire.executors.hf", "hf").sketch(folder, dtype)
    return ModelFacts(
        folder,
        config,
        drawn.spec,
        checkpoint,
        trouble,
        dtype,
        drawn.parameters,
        drawn.layers,
        foreign=True,
        whole=drawn.whole,
    )


def check(config: Mapping[str, Any], spec: ModelSpec, checkpoint: Checkpoint, quantization: str) -> None:
    """Every tensor has a place of its shape. Raises InvalidModel naming those that have not."""
    build = ModelOutline(config, spec, quantization, torch.bfloat16, checkpoint.entries).build()
    check_tensors(build, checkpoint.folder.name, entries_by_slot(build, checkpoint))


def shapes(facts: ModelFacts) -> Iterator[Fact]:
    """Architecture and sizes."""
    spec = facts.spec
    yield "architecture", spec.architecture
    if facts.foreign:
        yield from foreign_shapes(facts)
        return
    used = f", {count(facts.parameters - idle_parameters(spec))} used a token" if spec.experts else ""
    yield "parameters", count(facts.parameters) + used
    yield "layers", f"{spec.layers} of width {spec.hidden}, MLP {spec.mlp} ({spec.activation})"
    if moe := spec.experts:
        dense = f", layers {', '.join(map(str, sorted(moe.dense_layers)))} dense" if moe.dense_layers else ""
        if spec.mamba is not None and moe.dense_layers:
            dense = f", in {spec.layers - len(moe.dense_layers)} of {spec.layers} layers"
        shared = f", beside a shared one of width {moe.shared}" if moe.shared else ""
        yield (
            "experts",
            f"{moe.num_experts_per_token} of {moe.num_experts} a token, of width {moe.width}{shared}{dense}",
        )
    if facts.draft_parameters:
        option = "" if spec.draft_layers else ', with --speculative-config \'{"method": "mtp"}\''
        layers = spec.draft_layers or spec.skipped_drafts
        what = f"{layers} layer{'s' if layers > 1 else ''} for multi-token prediction"
        yield "drafts", f"{what}, {count(facts.draft_parameters)} parameters{option}"
    heads = (
        f"{heads} of keys and values, {dim} numbers each" for heads, dim in dict.fromkeys(spec.each_heads) if heads
    )
    yield "heads", f"{spec.heads} of queries, {'; '.join(heads)}"
    if spec.recurrent:
        size = spec.state_bytes(facts.dtype.itemsize)
        yield (
            "recurrent",
            f"{len(spec.recurrent)} of {spec.layers} layers, states of {amount(size)} a sequence or snapshot",
        )
    local = Counter(f"{size:,} positions" for size in spec.windows if size < UNLIMITED)
    local.update(f"their own chunk of {size:,} positions" for size in spec.layer_chunks if size < UNLIMITED)
    seen = ", ".join(f"{n} of {spec.layers} layers see {what}" for what, n in local.items())
    if spec.latent is not None and (index := spec.latent.index) is not None:
        seen = f"every layer attends to {index.top:,} positions, chosen by an indexer of {index.heads} heads"
    yield "attention", seen or "every layer attends to all positions"
    yield "rope", describe_ropes(spec.layer_ropes)
    head = f", head {'tied to the embedding' if spec.tie else 'of its own'}" if spec.generates else ""
    yield "vocabulary", f"{spec.vocab:,}{head}"
    yield "context", f"{spec.context:,} tokens"
    if spec.bidirectional:
        size = block_bytes(layer_shapes(spec.kv_shapes, facts.dtype), 1)
        yield "KV a token", f"{size:,} bytes ({short(facts.dtype)}), of one layer, while its prompt is computed"
        return
    dtypes = [("as activations", facts.dtype), ("fp8", torch.float8_e4m3fn)][: 1 + spec.generates]
    for name, dtype in dtypes:
        size = block_bytes(layer_shapes(spec.kv_shapes, dtype), 1)
        yield (
            f"KV a token, {name}",
            f"{size:,} bytes ({short(dtype)}), {amount(size * spec.context)} for a whole context",
        )


def foreign_shapes(facts: ModelFacts) -> Iterator[Fact]:
    """Sizes of a model that transformers runs."""
    yield "run by", "transformers (--executor hf), slower than Quire's own layers"
    yield "parameters", count(facts.parameters)
    yield "vocabulary", f"{facts.spec.vocab:,}"
    yield "context", f"{facts.spec.context:,} tokens"
    if facts.layers is None:
        yield "KV a token", "known once it is loaded"
    else:
        size = block_bytes(facts.layers, 1)
        beside = ", beside states of fixed size" if facts.whole else ""
        yield "KV a token", f"{size:,} bytes{beside}, {amount(size * facts.spec.context)} for a whole context"


def files(facts: ModelFacts) -> Iterator[Fact]:
    """What the weights are stored in."""
    if facts.checkpoint is not None:
        entries = facts.checkpoint.entries.values()
        places = {entry.order[0] for entry in entries}
        total = sum(entry.size for entry in entries)
        yield "files", f"{len(places)} ({', '.join(sorted(places)[:2])}{', ...' * (len(places) > 2)}), {amount(total)}"
        kinds: Counter[str] = Counter()
        for entry in entries:
            kinds[entry.kind] += entry.size
        yield "stored as", ", ".join(f"{kind} {100 * size / total:.1f} %" for kind, size in kinds.most_common())
    yield "quantization", quantization(facts)
    yield "computed in", short(facts.dtype)
    yield "loads", facts.trouble or ("tried by transformers" if facts.foreign else "every tensor has its place")


def quantization(facts: ModelFacts) -> str:
    """How matrices are quantized: by a scheme of config.json, or in types of GGUF."""
    scheme = read_scheme(facts.config)
    if scheme is not None:
        return f"{scheme.name}: {scheme.layout}"
    kinds = set() if facts.checkpoint is None else {entry.kind for entry in facts.checkpoint.entries.values()}
    types = sorted(kinds & {kind.name for kind in KINDS.values() if kind.block > 1})
    return f"GGUF types {', '.join(types)}" if types else "none"


def text(settings: Settings, vocab: int) -> tuple[list[Fact], str, str]:
    """Tokenizer, template and sampling defaults; why they cannot be used, empty where they can; and why the tokenizer
    may be another model's than one of `vocab` token ids."""
    try:
        found = build_text(settings)
        return list(spoken(found)), "", found.tokenizer.doubts(vocab)
    except InvalidModel as error:
        return [("tokenizer", f"cannot be used: {error}")], str(error), ""


def spoken(found: Text) -> Iterator[Fact]:
    """Tokenizer, template and sampling defaults."""
    own = found.tokenizer
    framed, bare = own.encode("a"), own.encode("a", add_special_tokens=False)
    before = framed[: framed.index(bare[0])] if bare else framed
    yield "tokenizer", f"{own.vocab_size:,} entries, {len(own.special)} of them special"
    yield "begins with", show(own, before)
    yield "ends at", show(own, sorted(own.eos))
    source = "" if found.template is None else found.template.source
    knows = [word for word in ("tools", "add_generation_prompt", "enable_thinking") if word in source]
    template = f"{len(source):,} characters, knows {', '.join(knows) or 'messages only'}" if source else "none"
    if not found.pooler.generates:
        yield from pooled(found.pooler)
        return
    yield "chat template", template
    yield "tool calls", f"parsed as {found.tool_parser}; reasoning: {found.reasoning_parser}"
    defaults = ", ".join(f"{name} {value}" for name, value in found.defaults.items())
    place = "general.sampling" if found.folder.is_file() else "generation_config.json"
    yield "sampled by default", f"{defaults} ({place})" if defaults else "as OpenAI's API does"


def pooled(pooler: PoolerConfig) -> Iterator[Fact]:
    """What a model that gives no text is served for."""
    if pooler.classes:
        names = f"{', '.join(pooler.classes[:4])}{', ...' * (len(pooler.classes) > 4)}"
        yield "gives", f"{len(pooler.classes)} classes ({names}), {pooler.activation}; no text"
    else:
        length = "of length 1" if pooler.normalize else "as they are"
        yield "gives", f"vectors, by {pooler.pooling} pooling, {length}; no text"
    if pooler.dense:
        yield "after pooling", ", ".join(f"{each.outputs} numbers, {each.activation}" for each in pooler.dense)
    if pooler.max_length is not None:
        yield "longest text", f"{pooler.max_length:,} tokens"
    if pooler.prompts:
        yield "prompts", ", ".join(pooler.prompts)


def show(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Texts and ids of tokens."""
    return ", ".join(f"{tokenizer.token_text(token)[0]!r} ({token})" for token in tokens) or "nothing"


def describe_ropes(ropes: Sequence[RopeConfig]) -> str:
    """The rotary embeddings of all layers in words."""
    shown = list(dict.fromkeys(describe_rope(rope) for rope in ropes if rope.dim))
    without = sum(not rope.dim for rope in ropes)
    if shown and without:
        shown.append(f"none in {without} of {len(ropes)} layers")
    return "; ".join(shown) or "none"


def describe_rope(rope: RopeConfig) -> str:
    """A rotary embedding in words."""
    scaled = "" if rope.kind in ("default", "proportional") else f", {rope.kind} scaling by {rope.factor:g}"
    neighbours = ", by neighbours" if rope.interleaved else ""
    return f"base {rope.theta:,.0f} over {int(rope.dim * rope.share)} numbers of a head{neighbours}{scaled}"


def short(dtype: torch.dtype) -> str:
    """A dtype's name."""
    return str(dtype).removeprefix("torch.")


def count(numbers: int) -> str:
    """A large number, rounded: 1.24 B."""
    unit, size = next((each for each in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if numbers >= each[1]), ("", 1))
    return f"{numbers / size:.3g} {unit}".rstrip()


def run(settings: Settings) -> None:
    """`quire inspect`, see `quire.cli.late`."""
    facts = read_facts(settings)
    spoken, mute, doubts = text(settings, facts.spec.vocab)
    print_pairs([*shapes(facts), *files(facts), *spoken])
    if facts.trouble or mute:
        raise InvalidModel(facts.trouble or mute)
    if doubts:
        click.echo(f"WARNING: {doubts}", err=True)
