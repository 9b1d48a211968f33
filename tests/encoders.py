"""Tiny checkpoints of models that pool, with random weights, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

WORDS = (
    "the",
    "a",
    "dog",
    "cat",
    "bird",
    "fish",
    "tree",
    "house",
    "river",
    "stone",
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "new",
    "runs",
    "sings",
    "sleeps",
    "eats",
    "sees",
    "under",
    "over",
    "near",
    "with",
    "and",
    "or",
    "not",
    "very",
    "quick",
    "slow",
    "who",
    "what",
    "where",
    "why",
    "when",
    "it",
    "is",
    "was",
    "be",
    "on",
    "in",
    "of",
    "to",
    "from",
    "at",
    "by",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB = 96

BERT = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 52,
        "max_position_embeddings": 130,
        "pad_token_id": 0,
    }
)
DECODER = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 52,
        "max_position_embeddings": 160,
        "pad_token_id": 0,
    }
)


class Family(NamedTuple):
    """A model type, fields of its config.json, and how its embeddings are pooled by default."""

    model_type: str
    fields: Mapping[str, Any]
    pooling: str
    classifier: bool = True
    pairs: bool = True


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family("bert", BERT, "cls"),
        "roberta": Family("roberta", {**BERT, "type_vocab_size": 1, "pad_token_id": 1}, "cls"),
        "xlm-roberta": Family("xlm-roberta", {**BERT, "type_vocab_size": 1, "pad_token_id": 1}, "cls"),
        "distilbert": Family(
            "distilbert",
            {
                "vocab_size": VOCAB,
                "dim": 32,
                "n_layers": 3,
                "n_heads": 4,
                "hidden_dim": 52,
                "max_position_embeddings": 130,
                "pad_token_id": 0,
            },
            "cls",
        ),
        "modernbert": Family(
            "modernbert",
            {
                **BERT,
                "num_hidden_layers": 5,
                "local_attention": 14,
                "classifier_pooling": "mean",
                "cls_token_id": 2,
                "sep_token_id": 3,
                "bos_token_id": 2,
                "eos_token_id": 3,
            },
            "cls",
        ),
        "nomic": Family("nomic_bert", {**BERT, "intermediate_size": 40}, "cls"),
        "embeddinggemma": Family(
            "gemma3_text",
            {
                **DECODER,
                "num_hidden_layers": 4,
                "sliding_window": 11,
                "use_bidirectional_attention": True,
                "query_pre_attn_scalar": 9,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            "mean",
            classifier=False,
        ),
        "qwen3": Family("qwen3", DECODER, "last"),
        "qwen2": Family("qwen2", DECODER, "last"),
        "llama": Family("llama", DECODER, "last"),
        "mistral": Family("mistral", {**DECODER, "sliding_window": None}, "last"),
        "gemma3": Family(
            "gemma3_text", {**DECODER, "sliding_window": 12, "query_pre_attn_scalar": 9}, "last", classifier=True
        ),
    }
)


def tokenizer(bert: bool = True) -> tokenizers.Tokenizer:
    """Words of a small vocabulary, between [CLS] and [SEP], pairs with types as BERT's, if `bert`."""
    names = [*SPECIAL, *WORDS, *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocab = {name: i for i, name in enumerate(names[:VOCAB])}
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.add_special_tokens(list(SPECIAL))
    if bert:
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return core


def randomized(model: Any, seed: int) -> Any:
    """The model with every parameter random, such that leaving any out changes results."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (1.0 if "embed" not in name else 4.0))
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model.eval()


def write(folder: Path, name: str, *, labels: int = 0, seed: int = 0, **fields: Any) -> Any:
    """A checkpoint of a family, an embedder or a classifier with `labels`; returns transformers' model."""
    family = FAMILIES[name]
    fields = {**family.fields, **fields}
    if labels:
        fields["num_labels"] = labels
    config = AutoConfig.for_model(family.model_type, **fields)
    config._attn_implementation = "eager"
    kind = AutoModelForSequenceClassification if labels else AutoModel
    model = randomized(kind.from_config(config), seed)
    model.save_pretrained(folder)
    core = tokenizer()
    # As sentence-transformers saves them: nothing may be cut because of it.
    core.enable_truncation(16)
    core.enable_padding()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"})
    )
    return model


def sentence_transformers(
    folder: Path,
    *,
    pooling: str = "mean",
    dense: Sequence[tuple[int, int, str]] = (),
    normalize: bool = True,
    **about: Any,
) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    """sentence-transformers' files beside a checkpoint; returns the weights and biases of the dense layers."""
    from safetensors.torch import save_file

    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "1_Pooling").mkdir()
    flags = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    named = {f"pooling_mode_{flag}": kind == pooling for kind, flag in flags.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **named}))
    made = []
    for i, (inputs, outputs, activation) in enumerate(dense, 2):
        at = folder / f"{i}_Dense"
        at.mkdir()
        generator = torch.Generator().manual_seed(i)
        weight, bias = (
            torch.randn(outputs, inputs, generator=generator) * inputs**-0.5,
            torch.randn(outputs, generator=generator),
        )
        save_file({"linear.weight": weight, "linear.bias": bias}, at / "model.safetensors")
        names = {"in_features": inputs, "out_features": outputs, "bias": True}
        function = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
        (at / "config.json").write_text(json.dumps({**names, "activation_function": function}))
        modules.append({"idx": i, "name": str(i), "path": at.name, "type": "sentence_transformers.models.Dense"})
        made.append((weight, bias, activation))
    if normalize:
        path = f"{len(modules)}_Normalize"
        modules.append({"idx": 9, "name": "9", "path": path, "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    if "max_seq_length" in about:
        limit = {"max_seq_length": about.pop("max_seq_length"), "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(limit))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    return made


@torch.inference_mode()
def states(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
    """Hidden states [T, hidden] of one text."""
    extra = {} if types is None else {"token_type_ids": torch.tensor([types])}
    made = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **extra)
    return made.last_hidden_state[0]


@torch.inference_mode()
def logits(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
    """A classifier's numbers [classes] of one text."""
    extra = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return model(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **extra
    ).logits[0]


def pooled(states: torch.Tensor, how: str) -> torch.Tensor:
    """One vector of hidden states."""
    return {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[how]


def texts(count: int = 24, seed: int = 3, longest: int = 100) -> list[str]:
    """Texts of all lengths, in any order; some have as many words as fit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    lengths[::5] = [1 + length % 9 for length in lengths[::5]]
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())
        for length in lengths
    ]
