"""Quantization formats: read from a checkpoint's quantization_config, or made while loading on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.layers.quantization.base import Format, Layout, Matrix, MatrixPart, WeightStorage
from quire.layers.quantization.gguf import BlockQuantization, StoredBlocks
from quire.layers.quantization.integers import IntegerScheme
from quire.layers.quantization.mxfp4 import GROUP, Mxfp4Scheme
from quire.layers.quantization.scaled import ROW, TILE, OnlineQuantization, ScaleScheme
from quire.models.spec import Config
from quire.ops.base import Ops
from quire.ops.quantized import E4M3
from quire.types import UNLIMITED
from quire.weights.entries import TensorEntry

AUTO = "auto"

ONLINE: Mapping[str, ScaleScheme | StoredBlocks] = {
    "fp8": ScaleScheme(E4M3, ROW),
    "fp8_per_block": ScaleScheme(E4M3, TILE),
    "int8": ScaleScheme(torch.int8, ROW),
    "int8_w8a8": ScaleScheme(torch.int8, ROW, activations=True),
    **{
        name: StoredBlocks(name.upper(), block, size)
        for name, block, size in (
            ("q8_0", 32, 34),
            ("q6_k", 256, 210),
            ("q5_k", 256, 176),
            ("q4_k", 256, 144),
            ("q4_0", 32, 18),
        )
    },
}
"""Methods of `--quantization` for plain weights, made while loading."""

IGNORED_TENSORS = (
    "*.input_scale",
    "*.input_scale_ub",
    "*.weight_shape",
    "*.input_zero_point",
)
"""Tensors of quantized checkpoints that are not needed: activations are scaled dynamically."""


def modules_of(names: Iterable[str]) -> frozenset[str]:
    """The modules that have tensors of these names."""
    return frozenset(name.rpartition(".")[0] for name in names)


NO_PREFIXES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization_config. name: its quant_method. layout: of quantized matrices. skipped: modules left plain."""

    name: str
    layout: Layout
    skipped: Sequence[str] = ()

    def is_skipped(self, name: str) -> bool:
        """Whether the config leaves this matrix, or a module that holds it, unquantized."""
        return any(matches_rule(name, rule) for rule in self.skipped)


class CheckpointFormat:
    """A format that keeps each matrix as the checkpoint stores it.

    entries: the checkpoint's tensors; where there are none (dummy weights), the config's names decide. prefixes: see
    `StoredFormat.renamed`.
    """

    def __init__(
        self,
        scheme: Scheme,
        plain: Format,
        entries: Mapping[str, TensorEntry],
        prefixes: Mapping[str, str] = NO_PREFIXES,
    ) -> None:
        self.scheme, self.plain, self.entries, self.prefixes = scheme, plain, entries, prefixes
        self.modules = modules_of(entries)

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        """Storage of the matrix as the scheme has it: quantized, or plain where its parts are."""
        plain = [self._plain(part.name, matrix.keep_precision) for part in matrix.parts]
        if shared is not None or all(plain):
            return self.plain(matrix, ops, shared)
        if any(plain):
            names = ", ".join(part.name for part in matrix.parts)
            raise InvalidModel(f"some of {names} are quantized and some not: they are multiplied as one, and cannot be")
        return self.scheme.layout.store(matrix, ops)

    @property
    def unit(self) -> int:
        """See `StoredFormat`."""
        return self.scheme.layout.unit

    def keeps(self, experts: Sequence[Sequence[MatrixPart]], cut: slice) -> bool:
        """See `StoredFormat`."""
        return not all(self._plain(part.name, False) for parts in experts for part in parts)

    def renamed(self, prefixes: Mapping[str, str]) -> CheckpointFormat:
        """See `StoredFormat`."""
        return CheckpointFormat(self.scheme, self.plain, self.entries, {**self.prefixes, **prefixes})

    def _theirs(self, name: str) -> list[str]:
        """What the checkpoint may call a module."""
        longer = (theirs + name.removeprefix(ours) for theirs, ours in self.prefixes.items() if name.startswith(ours))
        return [name, *longer]

    def _entry(self, name: str) -> TensorEntry | None:
        """The plain matrix of this name, or the tensor that holds it with those of other experts."""
        stack, _, number = name.rpartition(".")
        stacks = (stack, f"{stack}.weight") if number.isdecimal() else ()
        return next((self.entries[key] for key in (f"{name}.weight", *stacks) if key in self.entries), None)

    def _plain(self, name: str, keep_precision: bool) -> bool:
        names = self._theirs(name)
        entry = next((found for theirs in names if (found := self._entry(theirs)) is not None), None)
        if entry is not None:
            return entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        skipped = any(self.scheme.is_skipped(theirs) for theirs in names)
        return skipped or (keep_precision and not any(theirs in self.modules for theirs in names))


def choose_format(config: Mapping[str, Any], asked: str, plain: Format, entries: Mapping[str, TensorEntry]) -> Format:
    """The format of a model. asked: "auto", one of ONLINE, or the method the checkpoint is in.

    Raises InvalidModel for a method that is not known, or that the checkpoint is not in.
    """
    scheme = read_scheme(config)
    if scheme is not None:
        if asked not in (AUTO, scheme.name) and not scheme.name.startswith(f"{asked}_"):
            raise InvalidModel(
                f"the checkpoint is already quantized by {scheme.name}: --quantization {asked} cannot be applied"
            )
        return CheckpointFormat(scheme, plain, entries)
    if asked == AUTO:
        return plain
    if asked not in ONLINE:
        raise InvalidModel(
            f"--quantization {asked}: the checkpoint is not quantized in this format, and only "
            f"{', '.join(ONLINE)} can be made "
            f"while loading.{nearest(asked, ONLINE)}"
        )
    chosen = ONLINE[asked]
    return BlockQuantization(chosen, plain) if isinstance(chosen, StoredBlocks) else OnlineQuantization(chosen, plain)


def read_scheme(fields: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None where nothing is quantized. Raises InvalidModel for one we cannot read."""
    inner = fields.get("text_config")
    found: list[Mapping[str, Any]] = [
        at for at in (fields, inner) if isinstance(at, Mapping) and (CONFIG in at or COMPRESSION in at)
    ]
    if not found:
        return None
    config = Config(found[0]).section(CONFIG, COMPRESSION)
    method = config.get(str, "quant_method", default="compressed-tensors" if "config_groups" in config.fields else "")
    if method not in READERS:
        known = ", ".join(READERS)
        raise InvalidModel(f"{config.where}: quant_method {method!r} is not supported (known: {known}).")
    return READERS[method](config)


CONFIG, COMPRESSION = "quantization_config", "compression_config"


def read_fp8(config: Config) -> Scheme:
    """FP8 with a scale per block, as DeepSeek V3 and Qwen 3 are published, or per matrix."""
    skipped = read_names(config, "modules_to_not_convert", "ignored_layers")
    block = config.fields.get("weight_block_size")
    if block is None:
        return Scheme("fp8", ScaleScheme(E4M3, (UNLIMITED, UNLIMITED)), skipped)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise InvalidModel(f"{config.where}: weight_block_size must be two numbers, rows and columns")
    return Scheme("fp8", ScaleScheme(E4M3, (block[0], block[1]), "weight_scale_inv"), skipped)


def read_fbgemm(config: Config) -> Scheme:
    """FP8 with a scale per row."""
    return Scheme("fbgemm_fp8", ScaleScheme(E4M3, ROW), read_names(config, "modules_to_not_convert"))


def read_awq(config: Config) -> Scheme:
    """AWQ (Lin et al. 2023), 4 bits."""
    bits, version = config.get(int, "bits", "w_bit", default=4), config.get(str, "version", default="gemm").lower()
    if bits != 4 or version != "gemm":
        raise InvalidModel(
            f"{config.where}: AWQ of {bits} bits, version {version!r}: only 4 bits, version 'gemm' is read"
        )
    group = config.fields.get("group_size", config.fields.get("q_group_size", 128))
    return Scheme(
        "awq", IntegerScheme("awq", read_group_size(config, group)), read_names(config, "modules_to_not_convert")
    )


def read_gptq(config: Config) -> Scheme:
    """GPTQ (Frantar et al. 2022), 4 or 8 bits. The first version of the layout stores zero points less 1."""
    bits = config.get(int, "bits", default=4)
    if bits not in (4, 8):
        raise InvalidModel(f"{config.where}: GPTQ of {bits} bits is not supported: only 4 and 8")
    more = 0 if config.get(str, "checkpoint_format", default="gptq") == "gptq_v2" else 1
    group = read_group_size(config, config.fields.get("group_size", 128))
    return Scheme("gptq", IntegerScheme("gptq", group, more=more, ordered=True, bits=bits))


def read_compressed(config: Config) -> Scheme:
    """compressed-tensors: one group of settings for all linear layers."""
    groups = config.section("config_groups")
    if len(groups.fields) != 1:
        raise InvalidModel(f"{config.where}: config_groups must hold one group, not {len(groups.fields)}")
    group = groups.section(next(iter(groups.fields)))
    weights, acts = group.section("weights"), group.section("input_activations")
    bits, kind = weights.get(int, "num_bits", default=8), weights.get(str, "type", default="int")
    skipped = read_names(config, "ignore")
    format = group.get(str, "format", default="") or config.get(str, "format", default="")
    packed = format == "pack-quantized"
    ordered = weights.fields.get("actorder") in ("group", True)
    symmetric = weights.get(bool, "symmetric", default=True)
    block = read_block(weights)
    if (format, kind, bits, block) == ("mxfp4-pack-quantized", "float", 4, (1, GROUP)):
        return Scheme("compressed-tensors", Mxfp4Scheme(), skipped)
    zeros = bits == 8 and (ordered or not symmetric)
    if kind == "int" and packed and block[0] == 1 and (bits == 4 or zeros):
        layout = IntegerScheme("packed", block[1], zeros=not symmetric, ordered=ordered, bits=bits)
        return Scheme("compressed-tensors", layout, skipped)
    if (kind, bits) not in (("int", 8), ("float", 8)) or not symmetric or ordered:
        raise InvalidModel(
            f"{config.where}: {kind}{bits} weights{'' if symmetric else ' with zero points'} are not supported so "
            "(known: float8, int8, MXFP4, and packed int4 and int8)"
        )
    dtype, rounds = (E4M3, False) if kind == "float" else (torch.int8, bool(acts.fields))
    if rounds and (acts.get(int, "num_bits", default=8) != 8 or block[1] != UNLIMITED):
        raise InvalidModel(f"{config.where}: int8 activations need int8 weights with one scale a row")
    return Scheme("compressed-tensors", ScaleScheme(dtype, block, packed=packed, activations=rounds), skipped)


def read_mxfp4(config: Config) -> Scheme:
    """MXFP4, as gpt-oss is published: floats of 4 bits, and a power of two for every 32."""
    return Scheme("mxfp4", Mxfp4Scheme(), read_names(config, "modules_to_not_convert"))


def read_block(weights: Config) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    strategy = weights.get(str, "strategy", default="tensor")
    if strategy == "block":
        block = weights.fields.get("block_structure")
        block = [int(n) if n.isdecimal() else 0 for n in block.split("x")] if isinstance(block, str) else block
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise InvalidModel(f"{weights.where}: block_structure must be two numbers")
        return block[0], block[1]
    group = (1, weights.get(int, "group_size", default=128) if strategy == "group" else 1)
    known: dict[str, tuple[int, int]] = {"tensor": (UNLIMITED, UNLIMITED), "channel": ROW, "group": group}
    if strategy not in known:
        raise InvalidModel(
            f"{weights.where}: strategy {strategy!r} is not supported (known: {', '.join(known)}, block)"
        )
    return known[strategy]


def read_group_size(config: Config, group: object) -> int:
    """Read a group size, where -1 means all columns."""
    if type(group) is not int or group == 0 or group < -1:
        raise InvalidModel(f"{config.where}: group_size must be a number of columns, or -1 for all")
    return UNLIMITED if group == -1 else group


def read_names(config: Config, *fields: str) -> tuple[str, ...]:
    """A list of module names, empty where there is none."""
    found: Any = next((config.fields[name] for name in fields if config.fields.get(name)), [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise InvalidModel(f"{config.where}: {fields[0]} must be a list of names")
    return tuple(found)


def matches_rule(name: str, rule: str) -> bool:
    """Whether a rule, a module's name, in which * stands for anything, or 're:' and an expression, matches this module
    or one that holds it."""
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    return fnmatchcase(f".{name}.", f"*.{rule}.*")


READERS: Mapping[str, Callable[[Config], Scheme]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed,
    "mxfp4": read_mxfp4,
}
