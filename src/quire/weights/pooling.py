"""How a model's hidden states become vectors, classes and scores: from the files of a checkpoint and the options.

sentence-transformers' files come first (modules.json and what it names), then options, then what is usual for the
architecture. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from quire.errors import InvalidConfig, InvalidModel, nearest
from quire.models.labels import class_count
from quire.tokenization.tokenizer import read_json, read_json_list
from quire.types import Pooling
from quire.weights.gguf import find_gguf, read_gguf

Activation = Literal["sigmoid", "softmax", "identity"]
"""What makes scores of a classifier's numbers."""

Convert = Literal["auto", "none", "embed", "classify"]
Runner = Literal["auto", "generate", "pooling"]

CLASSIFIER = "ForSequenceClassification"
BODIES = ("Model", "ForMaskedLM", CLASSIFIER)
"""How names of architectures end that pool."""


def pools_alone(architecture: str) -> bool:
    """Whether an architecture of this name has no language model's head; GPT2LMHeadModel has one."""
    return architecture.endswith(BODIES) and not architecture.endswith("LMHeadModel")


class DenseLayer(NamedTuple):
    """A layer after pooling: its folder, and what follows the product: tanh, identity and so on."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """How prompts become vectors.

    generates: the model is served for text, and gives vectors beside. classes: the names of the classes of a
    classifier, none for an embedder. pooling: which hidden states a vector is made of. dense: layers after pooling.
    normalize: vectors have length 1. activation: of a classifier. max_length: tokens of a text, None for the model's
    context. prompts, default_prompt: texts that stand before an input, by name, and the name of the one that does
    without being asked for. dimensions: numbers that vectors may be cut to; None: any, empty: none. token_types: as of
    `ModelSpec`. words: scores are made of the logits of these two, of no and of yes. by_template: pairs are written as
    Qwen3-Reranker expects them. by_chat: by the chat template that an option names, with roles query and document.
    """

    generates: bool = True
    classes: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    activation: Activation = "identity"
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: tuple[int, ...] | None = None
    token_types: int = 1
    words: tuple[str, str] | None = None
    by_template: bool = False
    by_chat: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked of it, as vLLM names it."""
        if self.generates:
            return ("embed",)
        return ("classify",) if self.classes else ("embed", "token_embed")


GENERATES = PoolerConfig()
"""A model that is served for text."""

OVERRIDES = (
    "architectures",
    "classifier_from_token",
    "is_original_qwen3_reranker",
    "is_matryoshka",
    "matryoshka_dimensions",
    "num_labels",
    "id2label",
)
"""Fields of config.json that may be overridden."""


def overridden(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with `hf_overrides`. Raises InvalidConfig for a field that may not be overridden."""
    for name in overrides:
        if name not in OVERRIDES:
            raise InvalidConfig(
                f"hf_overrides: {name} cannot be overridden, only {', '.join(OVERRIDES)}: edit config.json in a local "
                f"copy of the model.{nearest(name, OVERRIDES)}",
                param="hf_overrides",
            )
    return {**fields, **overrides}


def read_pooler(
    folder: Path,
    *,
    runner: Runner = "auto",
    convert: Convert = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> PoolerConfig:
    """How the model in `folder` pools. options: of `pooler_config`. Raises InvalidModel and InvalidConfig."""
    if (file := find_gguf(folder)) is not None or not folder.is_dir():
        if runner == "pooling":
            raise InvalidConfig("--runner pooling needs a model folder; GGUF files are served for text", param="runner")
        return GENERATES if file is None else replace(GENERATES, pooling=gguf_pooling(file))
    fields = overridden(read_json(folder / "config.json"), overrides)
    modules = read_modules(folder)
    names = fields.get("architectures") or [""]
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    pools = pools_alone(architecture) or bool(modules) or fields.get("use_bidirectional_attention") is True
    pools |= fields.get("model_type") in ENCODERS and not architecture
    if runner == "generate" and pools_alone(architecture):
        raise InvalidConfig(f"--runner generate: {architecture} has no language model's head", param="runner")
    if runner == "generate" or (runner == "auto" and convert in ("auto", "none") and not pools):
        if options:
            raise InvalidConfig("pooler_config is for pooling models: say --runner pooling", param="pooler_config")
        return GENERATES
    found = classifier(fields, architecture, convert) or embedder(folder, fields, modules, architecture)
    return with_options(replace(found, token_types=token_types(fields)), options)


GGUF_POOLING: Mapping[Any, Pooling] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
"""llama.cpp's numbers of what is pooled."""


def gguf_pooling(file: Path) -> Pooling:
    """What a vector is made of, as a GGUF file says. Raises InvalidModel for a file of a reranker."""
    kind = read_gguf(file).get("pooling_type")
    if kind == _RANK:
        raise InvalidModel(
            f"{file.name} is a reranker, and GGUF files are served for text: name the checkpoint's folder"
        )
    return GGUF_POOLING.get(kind, GENERATES.pooling) if isinstance(kind, int) else GENERATES.pooling


_RANK = 4

ENCODERS = ("bert", "roberta", "xlm-roberta", "nomic_bert", "distilbert", "modernbert")
"""Values of `model_type`."""


def token_types(fields: Mapping[str, Any]) -> int:
    """How many token types the model has."""
    given = fields.get("type_vocab_size", 2)
    return int(given) if fields.get("model_type") in ENCODERS[:4] and type(given) is int else 1


def classifier(fields: Mapping[str, Any], architecture: str, convert: Convert) -> PoolerConfig | None:
    """A classifier, a cross-encoder among them; None for an embedder."""
    if not architecture.endswith(CLASSIFIER) or convert == "embed":
        if convert == "classify":
            raise InvalidConfig(
                f"--convert classify: {architecture or 'this model'} has no classifier; a reranker that answers with "
                "words is one by --hf-overrides: see docs/guides/scores.md",
                param="convert",
            )
        return None
    labels = fields.get("id2label")
    count = class_count(fields)
    names = tuple(
        str(labels.get(str(i), f"LABEL_{i}")) if isinstance(labels, dict) else f"LABEL_{i}" for i in range(count)
    )
    words = fields.get("classifier_from_token")
    if words is not None and (
        not isinstance(words, list) or len(words) != 2 or not all(isinstance(w, str) for w in words)
    ):
        raise InvalidConfig(
            'hf_overrides: classifier_from_token must be two words, such as ["no", "yes"]', param="hf_overrides"
        )
    if words is not None:
        names = names[:1] if labels and count == 1 else ("LABEL_0",)
    return PoolerConfig(
        generates=False,
        classes=names,
        pooling="classify",
        normalize=False,
        activation=activation_of(fields, len(names)),
        words=None if words is None else (words[0], words[1]),
        by_template=bool(fields.get("is_original_qwen3_reranker")),
    )


FUNCTIONS: Mapping[str, Activation] = MappingProxyType(
    {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
)


def activation_of(fields: Mapping[str, Any], count: int) -> Activation:
    """What makes scores of a classifier's numbers: as sentence-transformers' field says, else the kind of problem, else
    a sigmoid of one number and a softmax of several."""
    section = fields.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or fields.get("sbert_ce_default_activation_function")
    if named is not None:
        short = str(named).rpartition(".")[2]
        if short not in FUNCTIONS:
            raise InvalidModel(f"config.json: activation function {named!r} is not supported ({', '.join(FUNCTIONS)})")
        return FUNCTIONS[short]
    problem = fields.get("problem_type")
    kinds: Mapping[Any, Activation] = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return kinds.get(problem, "sigmoid" if count < 2 else "softmax")


def read_modules(folder: Path) -> list[Mapping[str, Any]]:
    """modules.json, empty where there is none. Raises InvalidModel."""
    modules = read_json_list(folder / "modules.json")
    if not all(isinstance(one, Mapping) and isinstance(one.get("type"), str) for one in modules):
        raise InvalidModel("modules.json must be a list of objects with a type")
    return modules


def embedder(
    folder: Path, fields: Mapping[str, Any], modules: Sequence[Mapping[str, Any]], architecture: str
) -> PoolerConfig:
    """What sentence-transformers' files say, or what is usual for the architecture. Raises InvalidModel."""
    found = PoolerConfig(generates=False, pooling=usual_pooling(fields, architecture), normalize=True)
    if modules:
        found = replace(found, normalize=False)
    for module in modules:
        kind, place = module["type"].rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Pooling":
            found = replace(found, pooling=read_pooling(place))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, read_dense(place)))
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        elif kind != "Transformer":
            raise InvalidModel(f"modules.json: {kind} is not supported, only Transformer, Pooling, Dense and Normalize")
    first = folder / str(modules[0].get("path", "")) if modules else folder
    limit = next(
        (one["max_seq_length"] for one in map(read_json, sbert_files(first)) if one.get("max_seq_length")), None
    )
    about = read_json(folder / "config_sentence_transformers.json")
    prompts = {k: v for k, v in (about.get("prompts") or {}).items() if isinstance(v, str)}
    default = about.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise InvalidModel(f"config_sentence_transformers.json: there is no prompt {default!r}")
    return replace(
        found,
        max_length=limit if type(limit) is int and limit > 0 else None,
        prompts=prompts,
        default_prompt=default,
        dimensions=matryoshka(fields),
    )


def sbert_files(folder: Path) -> list[Path]:
    """Where sentence-transformers keeps the longest length, by its models' kinds."""
    names = ("bert", "roberta", "distilbert", "xlm-roberta")
    return [folder / f"sentence_{name}_config.json" for name in names]


def matryoshka(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Dimensions that vectors may be cut to; None for any, as sentence-transformers' truncate_dim."""
    given = fields.get("matryoshka_dimensions")
    if isinstance(given, list) and given:
        return tuple(int(one) for one in given if type(one) is int)
    return () if fields.get("is_matryoshka") is False else None


def usual_pooling(fields: Mapping[str, Any], architecture: str) -> Pooling:
    """The first token's of an encoder, the mean of a decoder with bidirectional attention, the last of others."""
    if fields.get("use_bidirectional_attention") is True:
        return "mean"
    return "cls" if fields.get("model_type") in ENCODERS else "last"


MODES: Mapping[str, Pooling] = MappingProxyType(
    {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
)
"""sentence-transformers' names of what is pooled."""

FLAGS = tuple(
    f"pooling_mode_{name}"
    for name in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
)
"""Fields of 1_Pooling/config.json, of which one is true."""


def read_pooling(folder: Path) -> Pooling:
    """What 1_Pooling/config.json says. Raises InvalidModel for what is not supported."""
    config = read_json(folder / "config.json")
    mode = config.get("pooling_mode")
    named = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True and name in FLAGS]
    named = [mode] if isinstance(mode, str) else named
    if len(named) != 1 or named[0] not in MODES:
        raise InvalidModel(
            f"{folder.name}/config.json: pooling by {', '.join(named) or 'nothing'} is not supported, only by cls, "
            "mean or lasttoken alone"
        )
    if config.get("include_prompt", True) is False:
        raise InvalidModel(f"{folder.name}/config.json: include_prompt false is not supported")
    return MODES[named[0]]


def read_dense(folder: Path) -> DenseLayer:
    """A Dense module. Raises InvalidModel."""
    config = read_json(folder / "config.json")
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if not all(type(size) is int and 0 < size <= 1 << 20 for size in sizes):
        raise InvalidModel(f"{folder.name}/config.json: in_features and out_features must be sizes")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        known = ", ".join(DENSE_ACTIVATIONS)
        raise InvalidModel(f"{folder.name}/config.json: activation {activation!r} is not supported (known: {known})")
    return DenseLayer(folder, cast(int, sizes[0]), cast(int, sizes[1]), config.get("bias", True) is True, activation)


DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
"""torch's names of what may follow a dense layer."""

POOLING_TYPES: Mapping[str, Pooling] = MappingProxyType({"CLS": "cls", "MEAN": "mean", "LAST": "last"})
"""vLLM's names."""


def with_options(found: PoolerConfig, options: Mapping[str, Any]) -> PoolerConfig:
    """With `pooler_config`, of vLLM's names. Raises InvalidConfig for what is not there to be set."""
    known = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "activation", "max_length")
    for name, value in options.items():
        if name in ("pooling_type", "seq_pooling_type") and str(value).upper() in POOLING_TYPES and not found.classes:
            found = replace(found, pooling=POOLING_TYPES[str(value).upper()])
        elif name in ("normalize", "use_activation", "activation") and isinstance(value, bool) and found.classes:
            found = found if value else replace(found, activation="identity")
        elif name in ("normalize", "use_activation") and isinstance(value, bool):
            found = replace(found, normalize=value)
        elif name not in known:
            raise InvalidConfig(
                f"pooler_config: {name} is not known, only {', '.join(known[:4])}.{nearest(name, known)}",
                param="pooler_config",
            )
        else:
            kind = "a classifier" if found.classes else "this model"
            raise InvalidConfig(f"pooler_config: {name} {value!r} is not supported for {kind}", param="pooler_config")
    return found
