"""Load a model from a folder: tensors are streamed one by one into their final memory, fused and in their format."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.layers.quantization.base import Format, Matrix, Packable, Plain, WeightSlot
from quire.layers.quantization.deferred import Deferred
from quire.layers.quantization.gguf import GgufFormat, GgufStorage, OnlineBlocks, StoredBlocks, Tables, no_table
from quire.layers.quantization.packed import SMALL, Panels, packed_if_large
from quire.layers.quantization.scaled import OnlineQuantization, OnlineQuantized
from quire.models.registry import Model, build_model, read_spec
from quire.models.spec import ModelSpec
from quire.ops.base import Ops
from quire.ops.matmul import can_pack
from quire.ops.native.ops import NativeOps
from quire.ops.reference import ReferenceOps
from quire.ops.threads import single_threads
from quire.weights.canary import Canary
from quire.weights.entries import Cut, TensorEntry
from quire.weights.files import Checkpoint, listed, read_config
from quire.weights.gguf import KINDS
from quire.weights.outline import ModelOutline, expect_tensors, slot_bytes
from quire.weights.schemes import AUTO, choose_format
from quire.weights.stacks import unstack

log = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), the first time with 0 done."""

READERS = 2
"""Threads: while one reads, the other converts and packs."""

PIECE = 16 << 20
"""Bytes that are read at a time."""

WAITING = 1 << 29, 8 << 30
"""Bytes of matrices between which they may be read behind the first answers. Fewer are soon read, and the time of a
first step that makes them would count as what prompts cost, of which more tokens fit into a step than of a larger
model's. More may take a slow disk longer than a first step has until it counts as stuck, and say nothing meanwhile."""

POOL = 1_048_573
"""Random numbers for dummy weights: a prime, so that no two rows of a matrix begin alike."""


Wanted = tuple[TensorEntry, WeightSlot]
"""A tensor, and where it goes."""


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


def load_model(
    folder: Path | str,
    *,
    dtype: DType = "auto",
    device: str | torch.device = "cpu",
    ops: Ops | None = None,
    parallel: ParallelGroup | None = None,
    load_format: LoadFormat = "auto",
    quantization: str = AUTO,
    canary: Canary | None = None,
    seed: int = 0,
    draft: bool = False,
    progress: Progress = no_progress,
    room: float = math.inf,
    max_model_len: int | None = None,
    pools: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    words: tuple[int, int] | None = None,
    vision: bool = False,
    mtp: bool = False,
    expert_parallel: bool = False,
    unpacked: list[Packable] | None = None,
) -> Model:
    """The model in `folder`, ready to run.

    dtype "auto" is the checkpoint's own, but float32 for float16 on a CPU, which has no arithmetic for it.
    load_format "dummy" needs config.json only and draws weights from `seed`, at such scales that activations stay
    finite and logits have a standard deviation near 1. quantization: see `schemes.choose_format`; `canary` checks
    quantized models. draft: this is a draft model, whose rows may round differently alone and in a batch, so that
    small products may take the fastest kernel. room: bytes of memory to load into, for devices that do not say so, such
    as a CPU. max_model_len: the longest sequence, in tokens; None: the model's context. pools: without the language
    model's head. overrides: fields in place of config.json's. words: token ids of no and yes, whose logits' difference
    is the classifier. vision: with the encoder of images, if there is one. mtp: with the layer for multi-token
    prediction. parallel: of whose ranks this one loads its part. expert_parallel: see `ModelBuilder`. unpacked: gets
    what the caller packs later, see `pack_beside`; None: all is packed. Raises InvalidModel for what cannot be loaded.
    """
    folder, device, parallel = Path(folder), torch.device(device), parallel or ONE_RANK
    config = {**read_config(folder), **overrides} | ({} if words is None else {"num_labels": 1, "id2label": None})
    spec = read_spec(config, pools=pools, mtp=mtp).for_length(max_model_len)
    spec = replace(spec, vision=spec.vision if vision else None, ranks=parallel.size)
    checkpoint = None if load_format == "dummy" else open_checkpoint(folder, words)
    ops, entries = ops or ReferenceOps(), checkpoint.entries if checkpoint else {}
    number = choose_dtype(dtype, spec, checkpoint, device, packed=ops.multiplies_integers)
    spec = ModelOutline(config, spec, quantization, number, entries).for_stage(parallel.pipeline)
    plain, tables = stored_formats(choose_plain_format(number, device, draft, ops), ops, entries, spec)
    format = choose_format(config, quantization, plain, entries)
    how: dict[str, Any] = {"dtype": number, "device": device, "format": format, "tables": tables}
    how["defers"] = unpacked is not None and checkpoint is not None and can_defer(ops, format, plain, canary)
    build = ModelBuilder(ops=ops, parallel=parallel, expert_parallel=expert_parallel, **how)
    expect_tensors(build, entries)
    with torch.inference_mode():
        model = allocate_model(spec, build, folder.name)
        check_room(build, folder.name, room)
        if checkpoint is None:
            random_init(build, seed, progress)
        else:
            load_weights(build, checkpoint, progress, mapped=unpacked is not None)
        # Random weights say nothing about quality, nor do models without logits.
        canary = None if checkpoint is None or not spec.generates else canary
        reference = reference_of(canary, build, model, device) if isinstance(format, OnlineQuantization) else None
        finalize(build, [] if unpacked is None else unpacked)
        if canary and is_quantized(build, later=build.defers and format is not plain):
            canary.check(model, build.matrices, device, reference)
    return model


def is_quantized(build: ModelBuilder, *, later: bool) -> bool:
    """Whether one rank has quantized weights, so that every one checks them: the probe passes through all stages.
    later: whether these will be, which were checked at an earlier start."""
    own = later or any(stored.quantized is not None for stored in build.matrices)
    return not build.parallel.smallest(not own)


def can_defer(ops: Ops, format: Format, plain: Format, canary: Canary | None) -> bool:
    """Whether matrices may be read behind the first answers. Quantized ones that were never judged may not: that reads
    all of them, and finds what is wrong with them before they are served."""
    return ops.multiplies_integers and (format is plain or (canary is not None and canary.known is not None))


def finalize(build: ModelBuilder, unpacked: list[Packable]) -> None:
    """Convert all matrices to their final form, and note those that are still to be packed: those that a step needs
    last are behind the others, but for the embedding's."""
    build.finalize()
    every = [*build.matrices, *build.embeddings]
    weights = [each if isinstance(each, Deferred) else each.quantized for each in every]
    build.unpacked += [each for each in weights if each is not None and not each.packed]
    unpacked += build.unpacked


def allocate_model(spec: ModelSpec, build: ModelBuilder, name: str) -> Model:
    """The model, its weights not yet read. Raises InvalidModel where there is no memory for it."""
    try:
        return build_model(spec, build)
    except RuntimeError as error:
        # torch has no narrower error for a CPU without memory.
        if "memory" not in str(error):
            raise
        raise InvalidModel(f"there is no memory for {name}: `quire plan` says what fits") from error


def reference_of(canary: Canary | None, build: ModelBuilder, model: Model, device: torch.device) -> torch.Tensor | None:
    """The canary's answers before weights are quantized: all others are in their final form by then. None where
    nothing is checked, or all is known."""
    if canary is None or canary.known is not None:
        return None
    build.finalize(late=(OnlineQuantized, OnlineBlocks))
    return canary.record_reference(model, device)


def open_checkpoint(folder: Path, words: tuple[int, int] | None) -> Checkpoint:
    """The tensors of a folder. words: as of `load_model`."""
    checkpoint = Checkpoint(folder)
    if words is not None:
        checkpoint.entries = with_score_head(checkpoint, *words)
    return checkpoint


def with_score_head(checkpoint: Checkpoint, no: int, yes: int) -> Mapping[str, TensorEntry]:
    """The tensors and `score.weight`: the row of the head for yes less that for no. Raises InvalidModel."""
    heads = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    head = next((checkpoint.entries[name] for name in heads if name in checkpoint.entries), None)
    if head is None:
        raise InvalidModel(f"{checkpoint.folder.name} has no head to make a classifier of: none of {', '.join(heads)}")

    def difference(cut: Cut) -> torch.Tensor:
        rows = [head.read((slice(word, word + 1),)).float() for word in (yes, no)]
        return (rows[0] - rows[1])[cut]

    score = replace(
        head, dtype=torch.float32, shape=(1, head.shape[1]), read=difference, copy=None, stored=None, each=None
    )
    return {**checkpoint.entries, "score.weight": score}


def check_room(build: ModelBuilder, name: str, room: float) -> None:
    """Raises InvalidModel for weights that take more than `room` bytes."""
    held = slot_bytes(build)
    if held > room:
        sizes = f"{held / 2**30:.1f} GiB of weights, and there are {room / 2**30:.1f} GiB"
        raise InvalidModel(f"there is no memory for {name}: {sizes}; `quire plan` says what fits")


def choose_dtype(
    asked: DType, spec: ModelSpec, checkpoint: Checkpoint | None, device: torch.device, *, packed: bool = False
) -> torch.dtype:
    """dtype of activations and of plain weights.

    packed: kernels multiply quantized blocks as they are stored, and rows in bfloat16 the fastest.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if asked != "auto":
        return known[asked]
    found = known.get(spec.dtype.removeprefix("torch."))
    if found is None and checkpoint is not None:
        found = dtype_of_most(checkpoint.entries, packed)
    if found is torch.float16 and device.type == "cpu":
        return torch.float32
    return found or torch.float32


def dtype_of_most(entries: Mapping[str, TensorEntry], packed: bool) -> torch.dtype | None:
    """The dtype of most numbers of a checkpoint, None where none is floating-point. A GGUF file's norms are float32
    whatever its matrices are: blocks count as bfloat16 where they are kept `packed`, else as what they are read as."""
    counts = dict[torch.dtype, int]()
    for entry in entries.values():
        own = torch.bfloat16 if packed and entry.stored is not None else entry.dtype
        if own in (torch.float32, torch.bfloat16, torch.float16):
            counts[own] = counts.get(own, 0) + math.prod(entry.shape)
    return max(counts, key=lambda each: counts[each], default=None)


def choose_plain_format(dtype: torch.dtype, device: torch.device, draft: bool, ops: Ops) -> Format:
    """Format of plain weights: in panels or packed for oneDNN where the CPU can, else as they are."""
    if isinstance(ops, NativeOps) and dtype is torch.bfloat16:
        return partial(Panels, spare=[])
    least = SMALL if draft and dtype is torch.float32 else 0
    return partial(packed_if_large, spare=[], least=least) if can_pack(dtype, device) else Plain


def stored_formats(
    plain: Format, ops: Ops, entries: Mapping[str, TensorEntry], spec: ModelSpec
) -> tuple[Format, Tables]:
    """Formats of matrices and embeddings that keep GGUF's blocks, where there are any and kernels multiply them. Of
    others, a head that is the embedding is kept once, where it is in panels."""
    blocks = stored_blocks(entries) if ops.multiplies_integers else {}
    kept = GgufFormat(plain, blocks)
    if blocks:
        return kept, kept.table
    in_panels = isinstance(plain, partial) and plain.func is Panels
    ties = spec.tie and spec.generates and not spec.head_bias
    return plain, partial(tied_table, spec.vocab) if in_panels and ties else no_table


def tied_table(vocab: int, matrix: Matrix, ops: Ops) -> Panels | None:
    """The table of an embedding as the head that it is; None for tables of something else than tokens."""
    return Panels(matrix, ops) if matrix.parts[0].rows == vocab else None


def stored_blocks(entries: Mapping[str, TensorEntry]) -> Mapping[str, StoredBlocks]:
    """How tensors in quantized blocks are stored, by name."""
    kinds = {kind.name: kind for kind in KINDS.values()}
    return {
        name: StoredBlocks(entry.kind, kinds[entry.kind].block, kinds[entry.kind].size)
        for name, entry in entries.items()
        if entry.stored is not None
    }


def map_blocks(build: ModelBuilder, entries: Mapping[str, TensorEntry]) -> None:
    """Let matrices that are in a file as they are wanted be read there, and drop their slots.

    Those of experts are made one matrix while loading.
    """
    if build.unjoined or build.stacks:
        return
    stored = {name: entry.mapped for name, entry in entries.items()}
    for each in (*build.embeddings, *build.matrices):
        if isinstance(each, GgufStorage) and (tiles := each.map_file(stored)):
            for part in each.matrix.parts:
                places = build.slots[f"{part.name}.weight"]
                build.slots[f"{part.name}.weight"] = [place for place in places if place.buffer not in tiles]


def load_weights(build: ModelBuilder, checkpoint: Checkpoint, progress: Progress, *, mapped: bool = False) -> None:
    """Fill every slot from the checkpoint, in the order of the files. mapped: see `map_blocks`."""
    entries = entries_by_slot(build, checkpoint)
    check_tensors(build, checkpoint.folder.name, entries)
    if mapped:
        map_blocks(build, entries)
    for pattern in build.skipped:
        if skipped := [name for name in entries if fnmatchcase(name, pattern)]:
            log.info(
                "%d tensors of a layer for multi-token prediction are not loaded (%s): --speculative-config "
                '\'{"method": "mtp"}\' drafts with it',
                len(skipped),
                pattern,
            )
    wanted = [(entry, place) for name, entry in entries.items() for place in build.slots.get(name, ())]
    wanted.sort(key=lambda pair: pair[0].order)
    wanted = split_deferred(build, wanted, checkpoint.folder)
    total = sum(size_of(place, entry) for entry, place in wanted)
    jobs = [(entry, piece) for entry, place in wanted for piece in place.split(PIECE // place.target.itemsize)]
    done = 0
    progress(done, total)
    with single_threads(READERS, "load") as pool:
        for count in pool.map(load_piece, jobs):
            done += count
            progress(done, total)


def split_deferred(build: ModelBuilder, wanted: Sequence[Wanted], folder: Path) -> list[Wanted]:
    """What is read now. The rest is left to matrices that are read when they are wanted, but where matrices of experts
    are brought together, which need all of them, and in models of other sizes than `WAITING`."""
    every = [each for each in (*build.embeddings, *build.matrices) if isinstance(each, Deferred)]
    least, most = WAITING
    if build.unjoined or build.stacks or not least <= sum(each.nbytes for each in every) <= most:
        return list(wanted)
    owner = {id(place): each for each in every for place in each.places}
    own = dict[Deferred, list[Wanted]]()
    for entry, place in wanted:
        if (each := owner.get(id(place))) is not None:
            own.setdefault(each, []).append((entry, place))
    known = stamps(folder, [entry for pieces in own.values() for entry, _ in pieces])
    for each, pieces in own.items():
        each.read = partial(read_all, pieces, known)
    return [(entry, place) for entry, place in wanted if id(place) not in owner]


Stamp = tuple[int, ...]
"""By which a file is not another one of its name."""


def stamps(folder: Path, entries: Iterable[TensorEntry]) -> Mapping[Path, Stamp]:
    """Of the files that these tensors are in."""
    names = {str(entry.order[0]) for entry in entries}
    return {path: stamp(path) for path in ([folder] if folder.is_file() else [folder / name for name in names])}


def stamp(path: Path) -> Stamp:
    """Of a file; empty where it is not there."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def read_all(wanted: Sequence[Wanted], known: Mapping[Path, Stamp]) -> None:
    """Read these into their slots. Raises InvalidModel where their files are no longer those of which `known` are the
    stamps: one model would be made of two."""
    for entry, place in wanted:
        for piece in place.split(PIECE // place.target.itemsize):
            with suppress(FileNotFoundError):  # of which the same is said
                load_piece((entry, piece))
    for path, found in known.items():
        if stamp(path) != found:
            raise InvalidModel(f"{path.name} has changed while the model was read from it: load the model again")


@torch.inference_mode()
def load_piece(job: tuple[TensorEntry, WeightSlot]) -> int:
    """Read one piece into its slot; returns its bytes in the file."""
    entry, place = job
    if place.is_direct_copy:
        place.fill(partial(entry.read_into, place.shard))
    else:
        place.copy_from(entry.read(() if place.ignore_unit_dims else place.shard))
    return size_of(place, entry)


def size_of(place: WeightSlot, entry: TensorEntry) -> int:
    """Bytes in the file of what a slot takes."""
    return place.target.numel() * entry.dtype.itemsize


def entries_by_slot(build: ModelBuilder, checkpoint: Checkpoint) -> Mapping[str, TensorEntry]:
    """The checkpoint's tensors under the names the model knows.

    A body saved without its head lacks the first part of every name ("h.0.ln_1.weight" for "transformer.h.0...", as in
    OpenAI's GPT-2).
    """
    entries = {renamed(name, build.renames): entry for name, entry in checkpoint.entries.items()}
    for stack in build.stacks:
        places = build.slots.get(f"{stack.name}.0.weight")
        entries = unstack(entries, stack, places[0].shape if places else ())
    bytewise = (name for name, places in build.slots.items() if places[0].stored_dtype is torch.uint8)
    entries |= {name: entry.stored for name in bytewise if (entry := entries.get(name)) and entry.stored}
    longer = {name.partition(".")[2]: name for name in build.slots if name not in entries}
    body = {name.partition(".")[0] + "." for name in longer.values() if name.partition(".")[2] in entries}
    if len(body) != 1:
        return entries
    prefix = body.pop()
    return {
        prefix + name if prefix + name in build.slots or ignored(build, prefix + name) else name: entry
        for name, entry in entries.items()
    }


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """`name` with the first prefix that fits replaced."""
    for prefix, ours in renames.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def ignored(build: ModelBuilder, name: str) -> bool:
    """Whether this rank needs no tensor of this name."""
    return name.rpartition(".")[0] in build.elsewhere or any(fnmatchcase(name, pattern) for pattern in build.ignored)


def check_tensors(build: ModelBuilder, where: str, entries: Mapping[str, TensorEntry]) -> None:
    """Check that tensors and slots match one to one in name, shape and dtype. Raises InvalidModel naming others."""
    missing = [name for name in build.slots if name not in entries]
    if missing and all(any(fnmatchcase(name, pattern) for pattern in build.optional) for name in missing):
        raise InvalidModel(
            f"{where} has no weights of its layer for multi-token prediction ({listed(missing)}): leave out "
            "speculative_config's method mtp"
        )
    if missing:
        raise InvalidModel(f"{where} lacks {len(missing)} tensors of the model: {listed(missing)}")
    strange = [name for name in entries if name not in build.slots and not ignored(build, name)]
    if strange:
        raise InvalidModel(f"{where} holds {len(strange)} tensors the model has no place for: {listed(strange)}")
    for name, places in build.slots.items():
        entry, shape = entries[name], places[0].shape
        if not places[0].fits(entry.shape):
            raise InvalidModel(f"{name} has shape {list(entry.shape)}, but config.json makes it {list(shape)}")
        if not places[0].accepts(entry.dtype):
            wanted = "" if places[0].stored_dtype is None else f", where {dtype_name(places[0].stored_dtype)} belongs"
            raise InvalidModel(f"{name} is stored as {dtype_name(entry.dtype)}{wanted}: not supported")


def dtype_name(dtype: torch.dtype) -> str:
    """'float16' for torch.float16."""
    return str(dtype).removeprefix("torch.")


def random_init(build: ModelBuilder, seed: int, progress: Progress) -> None:
    """Fill every slot with random numbers: one pool, tiled from a different start each time, at memory speed."""
    places = [place for places in build.slots.values() for place in places]
    total = sum(place.target.nbytes for place in places)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, generator=generator).repeat(2).to(build.device)
    starts = torch.randint(POOL, (len(places),), generator=generator).tolist()
    done = 0
    progress(done, total)
    for place, start in zip(places, starts, strict=True):
        if not place.target.numel():
            continue
        place.fill(partial(fill_random, place, pool=pool, start=start))
        done += place.target.nbytes
        progress(done, total)


def fill_random(place: WeightSlot, into: torch.Tensor, pool: torch.Tensor, start: int) -> None:
    """Fill `into` with numbers of the slot's mean and deviation."""
    flat = into.view(-1)
    once = min(POOL, flat.numel())
    scaled = torch.add(place.mean, pool[start : start + once], alpha=place.std).to(flat.dtype)
    whole = flat.numel() // once * once
    flat[:whole].view(-1, once).copy_(scaled.expand(whole // once, once))
    flat[whole:].copy_(scaled[: flat.numel() - whole])
