"""Write a model as a GGUF file of a type: which tensors get which, and whether the file says what the model does."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from quire.errors import InvalidModel, nearest
from quire.models.registry import read_spec
from quire.models.spec import Config, ModelSpec
from quire.tokenization.gguf_vocabulary import template_facts, vocabulary_facts
from quire.tokenization.tokenizer import Tokenizer
from quire.tokenization.vocabularies import from_gguf as read_vocabulary
from quire.weights.canary import PROBE, Quality, answers, compare, probe
from quire.weights.entries import TensorEntry, file_entry
from quire.weights.file_types import FILE_TYPES, NAMES
from quire.weights.files import Checkpoint, listed, read_config
from quire.weights.gguf import Gguf, find_gguf, read_gguf
from quire.weights.gguf_export import constant, differences, export, names_drafts
from quire.weights.gguf_model import FACTORS, PLAIN, block_entry, gguf_config
from quire.weights.gguf_sampling import sampling_facts
from quire.weights.gguf_write import KIND_BY_NAME, NewTensor, write_gguf
from quire.weights.load import Progress, check_tensors, entries_by_slot, load_model, no_progress
from quire.weights.outline import ModelOutline
from quire.weights.schemes import AUTO

log = logging.getLogger(__name__)

FALLBACK: Mapping[str, str] = MappingProxyType({"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})
"""Types in place of K-quants for matrices whose rows are no multiple of 256 numbers."""

UNQUANTIZED = re.compile(
    r"norm|ssm_conv1d|ssm_[ad]$|ffn_gate_inp|position_embd|_bias$|\.bias$|sinks|rope_|layer_output_scale|exp_probs"
)
"""Tensors that stay float32: small ones, and routers."""

VERSION = 2
"""`general.quantization_version`: of the blocks' layouts."""


class Mixture(NamedTuple):
    """Which type the matrices of a layer get. base: most of them. head: the output, or the embedding where it is
    tied. better: `attn_v` and `ffn_down` of some layers, see `is_better`. fused: matrices of q, k and v together."""

    base: str
    head: str
    better: str = ""
    fused: str = ""


MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "f32": Mixture("F32", "F32"),
        "f16": Mixture("F16", "F16"),
        "bf16": Mixture("BF16", "BF16"),
        "q8_0": Mixture("Q8_0", "Q8_0"),
        "q4_0": Mixture("Q4_0", "Q6_K"),
        "q4_k_s": Mixture("Q4_K", "Q6_K", "Q5_K"),
        "q4_k_m": Mixture("Q4_K", "Q6_K", "Q6_K", "Q5_K"),
        "q5_k_s": Mixture("Q5_K", "Q6_K"),
        "q5_k_m": Mixture("Q5_K", "Q6_K", "Q6_K", "Q6_K"),
        "q6_k": Mixture("Q6_K", "Q6_K"),
    }
)
"""llama.cpp's mixtures (llama-quant.cpp)."""


class Written(NamedTuple):
    """A file that was written. source, size: bytes of the weights, before and after. kinds: how many tensors are of
    each type. quality: None where it was not checked."""

    path: Path
    source: int
    size: int
    kinds: Mapping[str, int]
    quality: Quality | None


def choose_type(asked: str) -> str:
    """The mixture of a name, in any case. Raises InvalidModel for one that is not written."""
    name = NAMES.get(asked.lower(), asked.lower())
    if name not in MIXTURES:
        known = ", ".join((*FILE_TYPES, *NAMES))
        raise InvalidModel(f"type {asked!r} is not written (known: {known}).{nearest(asked.lower(), FILE_TYPES)}")
    return name


def is_better(mixture: str, part: str, layer: int, layers: int) -> bool:
    """Whether a tensor of a layer gets the mixture's better type: in mixtures M the first and last eighths of the
    layers and every third between; in S the first four for `attn_v` and the first eighth for `ffn_down`."""
    if not part.startswith(("attn_v", "ffn_down")):
        return False
    eighth = layers // 8
    if mixture.endswith("_s"):
        return layer < (4 if part.startswith("attn_v") else eighth)
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def kind_of(mixture: str, name: str, shape: Sequence[int], layers: int, tied: bool) -> str:
    """The type that a tensor gets."""
    chosen = MIXTURES[mixture]
    if len(shape) < 2 or UNQUANTIZED.search(name):
        return "F32"
    part = name.rpartition("blk.")[2].partition(".")
    kind = chosen.base
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        kind = chosen.head
    elif name.startswith("blk."):
        own = part[2]
        if chosen.fused and own.startswith("attn_qkv"):
            kind = chosen.fused
        elif chosen.better and is_better(mixture, own, int(part[0]), layers):
            kind = chosen.better
    if shape[-1] % KIND_BY_NAME[kind][1].block:
        kind = FALLBACK.get(kind, "F16")
    return "F16" if shape[-1] % KIND_BY_NAME[kind][1].block else kind


def quantize(
    folder: Path,
    path: Path,
    asked: str,
    *,
    name: str = "",
    vocabulary: bool = True,
    threads: int = 1,
    check: bool = True,
    progress: Progress,
) -> Written:
    """Write the model in `folder`, or in a GGUF file, as a GGUF file at `path`.

    name: `general.name`. vocabulary: write the tokenizer and chat template too. check: compare its answers to a probe
    with the source's. Raises InvalidModel, before anything is written, for a model that GGUF cannot hold.
    """
    mixture = choose_type(asked)
    if path.exists():
        raise InvalidModel(f"{path} exists: remove it, or name another file")
    if path.suffix != ".gguf":
        raise InvalidModel(f"{path} must end with .gguf")
    config = read_config(folder)
    spec = read_spec(config)
    gguf = find_gguf(folder)
    facts, found = (
        from_gguf(read_gguf(gguf)) if gguf is not None else from_checkpoint(folder, config, spec, name, vocabulary)
    )
    facts |= {"general.file_type": FILE_TYPES[mixture], "general.quantization_version": VERSION}
    tied = not any(each.name == "output.weight" for each in found)
    layers = spec.layers
    new = [each._replace(kind=kind_of(mixture, each.name, each.entry.shape, layers, tied)) for each in found]
    if gguf is None:
        check_shape(spec, facts, new)
    write_gguf(path, facts, new, threads=threads, progress=progress)
    kinds: dict[str, int] = {}
    for each in new:
        kinds[each.kind] = kinds.get(each.kind, 0) + 1
    quality = check_file(folder, path) if check else None
    return Written(path, sum(each.entry.size for each in found), path.stat().st_size, kinds, quality)


def from_gguf(gguf: Gguf) -> tuple[dict[str, Any], list[NewTensor]]:
    """Metadata and tensors of a file that is written in another type."""
    facts = {
        key: value for key, value in gguf.facts.items() if not key.startswith("split.") and key != "general.alignment"
    }
    tensors = []
    for name, info in gguf.tensors.items():
        plain = PLAIN.get(info.kind.name)
        entry = (
            block_entry(info) if plain is None else file_entry(info.path, info.start, plain, info.shape, info.kind.name)
        )
        tensors.append(NewTensor(name, entry, ""))
    return facts, tensors


def from_checkpoint(
    folder: Path, config: Mapping[str, Any], spec: ModelSpec, name: str, vocabulary: bool
) -> tuple[dict[str, Any], list[NewTensor]]:
    """Metadata and tensors of a folder. Raises InvalidModel for what GGUF cannot hold."""
    checkpoint = Checkpoint(folder)
    build = ModelOutline(config, spec, AUTO, torch.bfloat16, checkpoint.entries).build()
    held = entries_by_slot(build, checkpoint)
    left = [key for pattern in build.skipped for key in held if fnmatchcase(key, pattern)]
    if left and names_drafts(spec):
        spec = read_spec(config, mtp=True)
        build = ModelOutline(config, spec, AUTO, torch.bfloat16, checkpoint.entries).build()
        held, left = entries_by_slot(build, checkpoint), []
    check_tensors(build, folder.name, held)
    if left:
        log.warning("%d tensors of a layer for multi-token prediction are not written: %s", len(left), listed(left))
    entries: dict[str, TensorEntry] = {key: entry for key, entry in held.items() if key in build.slots}
    made = export(spec, Config({**config, **(config.get("text_config") or {})}), entries)
    facts = {"general.architecture": made.architecture, "general.type": "model", "general.name": name or folder.name}
    facts |= {f"{made.architecture}.{key}": value for key, value in made.facts.items()}
    if vocabulary:
        facts |= vocabulary_facts(folder, spec.vocab)
        facts |= template_facts(folder)
        facts |= sampling_facts(folder)
    return facts, [NewTensor(own, entry, "", whole) for own, entry, whole in made.tensors]


def check_shape(spec: ModelSpec, facts: Mapping[str, Any], tensors: Sequence[NewTensor]) -> None:
    """Raise InvalidModel where the metadata would be read as another model. What it says is read back from a file with
    all names, and with the numbers of small tensors that are facts."""
    small = [each if each.name in FACTORS else each._replace(entry=constant([0.0])) for each in tensors]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "outline.gguf"
        write_gguf(place, facts, [each._replace(kind="F32", whole=False) for each in small], progress=no_progress)
        unlike = differences(spec, read_spec(gguf_config(read_gguf(place))))
    if unlike:
        raise InvalidModel(
            f"{spec.architecture}: GGUF's metadata has no way to say what config.json says of {', '.join(unlike)}: not "
            "written"
        )


def probe_tokens(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The probe in the tokens of a file, none where it has no tokenizer that is read."""
    try:
        core, config = read_vocabulary(facts)
    except InvalidModel:
        return ()
    return Tokenizer(core, config).encode(PROBE)


def check_file(folder: Path, path: Path) -> Quality:
    """How the file's answers to the probe compare with the source's, both computed in float32."""
    results = []
    tokens = probe(read_spec(read_config(folder)).vocab, probe_tokens(read_gguf(path).facts))
    for place in (folder, path):
        model = load_model(place, dtype="float32")
        results.append(answers(model, tokens, torch.device("cpu")))
        del model
    return compare(results[0], results[1], tokens)
