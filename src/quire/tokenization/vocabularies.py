"""Tokenizers of models without a tokenizer.json: GPT-2's pair of files, sentencepiece's tokenizer.model, tiktoken's
ranks, and GGUF files.

sentencepiece's format: sentencepiece_model.proto of github.com/google/sentencepiece.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.errors import InvalidModel

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces; GGUF has the same numbers."""

UNIGRAM, BPE = 1, 2

INSTEAD = (
    "Quire needs one to turn text into tokens; --tokenizer names another folder, and with --skip-tokenizer-init "
    "prompts and answers are token ids"
)
"""What to do about a checkpoint without a tokenizer."""


@dataclass(slots=True)
class SentencePieceModel:
    """A sentencepiece model: pieces in the order of their ids, with their scores and kinds.

    model: UNIGRAM or BPE. prefix: a space is prepended to every text. squeeze: runs of spaces become one.
    """

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model: int = UNIGRAM
    prefix: bool = True
    squeeze: bool = True


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse tokenizer.model. Raises InvalidModel."""
    found = SentencePieceModel()
    try:
        for number, value in fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(fields(value))
                found.pieces.append(bytes(piece[1]).decode("utf-8"))
                found.scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])  # type: ignore[arg-type]
                found.kinds.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                found.model = int(dict(fields(value)).get(3, UNIGRAM))
            elif number == 3 and isinstance(value, bytes):
                about = dict(fields(value))
                found.prefix = bool(about.get(3, 1))
                found.squeeze = bool(about.get(4, 1))
    except (IndexError, KeyError, ValueError, TypeError, struct.error):
        raise InvalidModel("tokenizer.model is not a sentencepiece model") from None
    if not found.pieces:
        raise InvalidModel("tokenizer.model is not a sentencepiece model")
    return found


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of a protobuf message. Raises ValueError for groups and truncated messages."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("truncated")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("unterminated integer")


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTED + r"\p{N}{1,3}" + REST
QWEN2 = CONTRACTED + r"\p{N}" + REST

MARKED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
CASED = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = f"{MARKED}*{CASED}+|{MARKED}+{CASED}*|\\p{{N}}{SLASHED}"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = f"{MARKED}*{CASED}+{SHORT}|{MARKED}+{CASED}*{SHORT}|\\p{{N}}{{1,3}}{SLASHED}"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = CONTRACTED + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How a text is split before its bytes are merged: by each expression in turn. whole: a word that is in the
    vocabulary is not split further. composed: characters are composed first (NFC)."""

    expressions: tuple[str, ...]
    whole: bool = False
    composed: bool = False


DIGITS = Split((r"\p{N}", GPT2))
THREES = Split((r"\p{N}{1,3}", KANA, DEEPSEEK3))

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(
        ("gpt-2", "default", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"), Split((GPT2,))
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), Split((LLAMA3,), whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((QWEN2,), composed=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez"), Split((QWEN2,))),
    "qwen35": Split((QWEN35,), composed=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((GPT4O,), whole=True)),
    "minimax-m2": Split((GPT4O,)),
    **dict.fromkeys(("tekken", "pixtral"), Split((TEKKEN,), whole=True)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), THREES),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "seed-coder": Split((SEED,)),
}
"""How texts are split, by the names that GGUF files have for it (llama-vocab.cpp of llama.cpp)."""

RANKED = re.compile(rb"[A-Za-z0-9+/=]+ \d+")


Read = tuple[tokenizers.Tokenizer, dict[str, Any]]
"""A tokenizer, and the fields that a tokenizer_config.json would add."""


def load_core(folder: Path) -> Read | None:
    """The tokenizer of a folder without tokenizer.json; None where there is none. Raises InvalidModel."""
    for words, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / words).is_file() and (folder / merges).is_file():
            return from_merges(folder / words, folder / merges), {}
    path = folder / "tokenizer.model"
    if path.is_file():
        data = path.read_bytes()
        # Llama 3 ships tiktoken's format under sentencepiece's file name.
        if RANKED.match(data):
            return from_ranks(read_ranks(data, path.name), Split((LLAMA3,), whole=True)), {}
        found = read_sentencepiece(data)
        return from_sentencepiece(found), special_tokens(found)
    ranked = sorted(folder.glob("*.tiktoken"))
    if ranked:
        return from_ranks(
            read_ranks(ranked[0].read_bytes(), ranked[0].name), Split((QWEN2,), whole=True, composed=True)
        ), {}
    return None


def special_tokens(found: SentencePieceModel) -> dict[str, Any]:
    """The begin and end tokens, by the names that Llama and Gemma give them."""
    control = {piece for piece, kind in zip(found.pieces, found.kinds, strict=True) if kind == CONTROL}
    names = {"bos_token": ("<s>", "<bos>"), "eos_token": ("</s>", "<eos>")}
    roles = {role: piece for role, pieces in names.items() for piece in pieces if piece in control}
    return {**roles, "add_bos_token": found.model == BPE}


def from_merges(words: Path, merges: Path) -> tokenizers.Tokenizer:
    """GPT-2's format: the vocabulary, and the merges in order. Raises InvalidModel."""
    try:
        vocab = json.loads(words.read_text("utf-8"))
        lines = merges.read_text("utf-8").splitlines()
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        return byte_level(vocab, pairs, Split((GPT2,)))
    # The library raises bare Exception.
    except Exception as error:
        raise InvalidModel(f"{words.name} and {merges.name} are not a vocabulary: {error}") from error


def byte_level(vocab: Mapping[str, int], merges: Sequence[tuple[str, ...]], split: Split) -> tokenizers.Tokenizer:
    """Byte-level BPE."""
    core = tokenizers.Tokenizer(models.BPE(dict(vocab), list(merges), ignore_merges=split.whole))  # type: ignore[arg-type]
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    if split.composed:
        core.normalizer = normalizers.NFC()
    return core


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    known = set(plain)
    return [chr(byte if byte in known else next(others)) for byte in range(256)]


def read_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """tiktoken's format: lines of a token in base64 and its rank. Raises InvalidModel."""
    ranks = {}
    try:
        for line in data.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise InvalidModel(
            f"{name} is not a tiktoken vocabulary: each line is a token in base64 and its rank"
        ) from None
    return ranks


def from_ranks(ranks: Mapping[bytes, int], split: Split) -> tokenizers.Tokenizer:
    """A tiktoken vocabulary as merges: of adjacent tokens, those that make the token of the lowest rank merge first."""
    letters = byte_alphabet()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    return byte_level(vocab, pairs_of(vocab, {word: -rank for word, rank in vocab.items()}), split)


def pairs_of(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of entries that together are an entry, in descending order of its score."""
    found = []
    for word, score in scores.items():
        halves = [(word[:i], word[i:]) for i in range(1, len(word))]
        own = [(a, b) for a, b in halves if a in vocab and b in vocab]
        found += [(-score, vocab[a], vocab[b], a, b) for a, b in own]
    return [(a, b) for *_, a, b in sorted(found)]


def from_sentencepiece(found: SentencePieceModel) -> tokenizers.Tokenizer:
    """A sentencepiece model (Llama 2, Gemma): underscores (U+2581) for spaces, and byte tokens for other text."""
    vocab = {piece: i for i, piece in enumerate(found.pieces)}
    unknown = next((i for i, kind in enumerate(found.kinds) if kind == UNKNOWN), None)
    fallback = BYTE in found.kinds
    if found.model == BPE:
        every = zip(found.pieces, found.scores, found.kinds, strict=True)
        scores = {piece: score for piece, score, kind in every if kind in (NORMAL, USER)}
        name = None if unknown is None else found.pieces[unknown]
        merges = pairs_of({piece: vocab[piece] for piece in scores}, scores)
        model: Any = models.BPE(vocab, merges, unk_token=name, fuse_unk=True, byte_fallback=fallback)
    elif found.model == UNIGRAM:
        pairs = list(zip(found.pieces, found.scores, strict=True))
        model = models.Unigram(pairs, unknown, byte_fallback=fallback)
    else:
        raise InvalidModel(
            f"tokenizer.model is of sentencepiece's kind {found.model}: only unigram (1) and BPE (2) are read"
        )
    core = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()] if found.squeeze else []
    steps += [normalizers.Prepend("▁")] if found.prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if found.prefix else parts)
    add_pieces(core, found.pieces, found.kinds)
    return core


def marked_merges(pieces: Sequence[str], kinds: Sequence[int], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Merges of characters, not of bytes, with underscores (U+2581) for spaces, and byte tokens for other text."""
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model: Any = models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)  # type: ignore[arg-type]
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_pieces(core, pieces, kinds)
    return core


def add_pieces(core: tokenizers.Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the special and user-defined pieces, which are matched before the text is split."""
    by_kind = {kind: [p for p, k in zip(pieces, kinds, strict=True) if k == kind] for kind in (UNKNOWN, CONTROL, USER)}
    special = [*by_kind[UNKNOWN], *by_kind[CONTROL]]
    core.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    core.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in by_kind[USER]])


TEMPLATE = "tokenizer.chat_template"
"""The chat template in a GGUF file's metadata; those of other names follow a dot."""


FOR_TOOLS = "tool_use"
"""The name of a checkpoint's template for requests with tools, of Command R and Hermes 2 Pro among others."""


def ends_of(facts: Mapping[str, Any]) -> list[int]:
    """The end tokens of a GGUF file: of the text, of a turn, of a message."""
    named = (facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    count = len(facts.get("tokenizer.ggml.tokens", ()))
    return [token for token in named if isinstance(token, int) and 0 <= token < count]


def from_gguf(facts: Mapping[str, Any]) -> Read:
    """The tokenizer of a GGUF file, and the fields that a tokenizer_config.json would add. Raises InvalidModel."""
    try:
        return _from_gguf(facts)
    except InvalidModel:
        raise
    # The library raises bare Exception, and damaged metadata may have any type.
    except Exception as error:
        raise InvalidModel(f"the file's tokenizer is damaged: {' '.join(str(error).split())}") from error


def _from_gguf(facts: Mapping[str, Any]) -> Read:

    def fact(name: str, default: Any = None) -> Any:
        return facts.get(f"tokenizer.ggml.{name}", default)

    pieces, kind = list(fact("tokens") or ()), fact("model")
    if not pieces:
        raise InvalidModel(f"the file holds no tokenizer: {INSTEAD}")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise InvalidModel(
            f"the file's tokenizer is {kind!r}: 'gpt2', 'llama' and 'gemma4' are read; name one with --tokenizer"
        )
    kinds, scores = fact("token_type", [1] * len(pieces)), fact("scores", [0.0] * len(pieces))
    if {len(kinds), len(scores)} != {len(pieces)}:
        raise InvalidModel(
            f"the file's tokenizer has {len(pieces)} tokens, {len(kinds)} types and {len(scores)} scores"
        )
    if kind == "llama":
        found = SentencePieceModel(pieces, scores, kinds, BPE, squeeze=False)
        found.prefix = bool(fact("add_space_prefix", True))
        core = from_sentencepiece(found)
    elif kind == "gemma4":
        core = marked_merges(pieces, kinds, fact("merges", ()))
    else:
        split = fact("pre", "default")
        if split not in SPLITS:
            raise InvalidModel(f"the file's pre-tokenizer {split!r} is not supported: name one with --tokenizer")
        merges = [tuple(merge.split(" ")) for merge in fact("merges", ())]
        if not merges:
            raise InvalidModel("the file's tokenizer has no merges: name one with --tokenizer")
        vocab = {piece: i for i, piece in enumerate(pieces)}
        core = byte_level(vocab, merges, SPLITS[split])
        add_pieces(core, pieces, kinds)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config = {
        role: pieces[i]
        for name, role in names.items()
        if (i := fact(f"{name}_token_id")) is not None and i < len(pieces)
    }
    config |= {name: fact(name) for name in ("add_bos_token", "add_eos_token") if fact(name) is not None}
    if kind == "llama":
        config = {"add_bos_token": True, **config}
    templates = {"default": facts.get(TEMPLATE), FOR_TOOLS: facts.get(f"{TEMPLATE}.{FOR_TOOLS}")}
    if any(source is not None for source in templates.values()):
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return core, config
