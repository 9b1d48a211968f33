"""A model folder's tokenizer as the metadata of a GGUF file: the opposite of `vocabularies.from_gguf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidModel
from quire.tokenization.template_files import templates_of
from quire.tokenization.tokenizer import Tokenizer, read_eos
from quire.tokenization.vocabularies import (
    BYTE,
    CONTROL,
    FOR_TOOLS,
    NORMAL,
    SPLITS,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER,
    ends_of,
    from_gguf,
    read_sentencepiece,
)

TEXTS = (
    "Hello world! It's 2024, and I'd said: \"that's 1234567 times 3.14\"\n\n  x = f(y)\t# done",
    "    if (a != b) { return 'c'; }\r\n\r\n...  end   ",
    "Grüße aus Köln, ça va? Ελληνικά и русский; 日本語のテキスト 漢字, 한국어 и 🦊🎉 e\u0301",
    "WORDS Of MiXed CASE camelCase HTTPServer don't CAN'T we'LL /path/to/file.txt?x=1&y=2 10,000.00",
    "",
    " ",
    "a",
)
"""What two tokenizers have to make the same tokens of."""

NAMES: Mapping[str, str] = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def vocabulary_facts(folder: Path, size: int) -> dict[str, Any]:
    """The metadata of the tokenizer in `folder`, whose model has `size` token ids.

    Raises InvalidModel where GGUF cannot say what the tokenizer does, as far as `TEXTS` show it.
    """
    tokenizer = Tokenizer.from_folder(folder)
    core = json.loads(tokenizer.to_json())
    model = core["model"]
    pieces, kinds = _pieces(core, size)
    facts: dict[str, Any] = {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": kinds}
    if model["type"] == "BPE" and not model.get("byte_fallback"):
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        facts |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        candidates: list[dict[str, Any]] = [{"tokenizer.ggml.pre": name} for name in _splits(core)]
    elif model["type"] == "BPE":
        spaced = "Prepend" in json.dumps(core.get("normalizer")) or '"prepend_scheme": "first"' in json.dumps(core)
        facts |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": _scores(folder, model, pieces)}
        candidates = [{"tokenizer.ggml.add_space_prefix": each} for each in (spaced, not spaced)]
    else:
        raise InvalidModel(f"a tokenizer of type {model['type']} is not written to GGUF files: only BPE is")
    facts |= _ids(tokenizer, folder)
    for candidate in candidates:
        if _same(tokenizer, facts | candidate):
            return facts | candidate
    raise InvalidModel("the tokenizer splits texts in a way that no GGUF file has a name for, as far as is known here")


def _pieces(core: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The entries by id, unused ones where the vocabulary has none, and their types."""
    vocab: dict[str, int] = core["model"]["vocab"]
    named = {number: piece for piece, number in vocab.items()}
    added = {each["id"]: each for each in core["added_tokens"]}
    highest = max((*named, *added), default=-1)
    if highest >= size:
        raise InvalidModel(f"the tokenizer has token ids up to {highest}, and the model {size}: is it this model's?")
    unknown = core["model"].get("unk_token")
    pieces, kinds = list[str](), list[int]()
    for number in range(size):
        token = added.get(number)
        piece = token["content"] if token else named.get(number, f"[PAD{number}]")
        pieces.append(piece)
        if token:
            kinds.append(UNKNOWN if piece == unknown else CONTROL if token["special"] else USER)
        elif number not in named:
            kinds.append(UNUSED)
        else:
            is_byte = core["model"].get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x")
            kinds.append(UNKNOWN if piece == unknown else BYTE if is_byte else NORMAL)
    return pieces, kinds


def _scores(folder: Path, model: Mapping[str, Any], pieces: Sequence[str]) -> list[float]:
    """Those of tokenizer.model, or else by the order of the merges: earlier ones score higher."""
    path = folder / "tokenizer.model"
    if path.is_file():
        held = read_sentencepiece(path.read_bytes())
        scores = dict(zip(held.pieces, held.scores, strict=True))
    else:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        scores = {}
        for rank, pair in enumerate(pairs):
            scores.setdefault("".join(pair), -float(rank))
    return [float(scores.get(piece, -1e6)) for piece in pieces]


def _splits(core: Mapping[str, Any]) -> Iterator[str]:
    """Names of `SPLITS`, one of each way to split, those with the tokenizer's own expressions first."""
    written = json.dumps(core.get("pre_tokenizer"))
    whole = bool(core["model"].get("ignore_merges"))
    names = dict[Any, str]()
    for name, split in SPLITS.items():
        if name != "default":
            names.setdefault(split, name)
    ranked = sorted(
        names,
        key=lambda split: (
            not all(json.dumps(each)[1:-1] in written for each in split.expressions),
            split.whole != whole,
            -len(split.expressions),
        ),
    )
    yield from (names[split] for split in ranked)


def _ids(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Ids of special tokens, and whether they are put around texts."""
    found = {
        f"tokenizer.ggml.{name}_token_id": number
        for name, role in NAMES.items()
        if role in tokenizer.tokens and (number := tokenizer.id_of(tokenizer.tokens[role])) is not None
    }
    listed = read_eos(folder)
    if listed:
        found.setdefault("tokenizer.ggml.eos_token_id", listed[0])
    others = [token for token in listed if token != found.get("tokenizer.ggml.eos_token_id")]
    found |= dict(zip(("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"), others, strict=False))
    if len(others) > 2:
        raise InvalidModel(f"the model ends at {len(others) + 1} tokens, and a GGUF file names three")
    framed, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return found | {
        "tokenizer.ggml.add_bos_token": framed[:1] == (tokenizer.bos,) and framed != bare,
        "tokenizer.ggml.add_eos_token": len(framed) > 1 and framed[-1] in tokenizer.eos and framed[-1] not in bare[-1:],
    }


def _same(tokenizer: Tokenizer, facts: Mapping[str, Any]) -> bool:
    """Whether the metadata's tokenizer makes the same tokens of `TEXTS`, and ends at the same."""
    core, config = from_gguf(facts)
    made = Tokenizer(core, config, eos=ends_of(facts))
    special = [f"{text}{token}{text}" for token in tokenizer.tokens.values() for text in ("", " a ")]
    texts = (*TEXTS, *special)
    return made.eos == tokenizer.eos and all(made.encode(text) == tokenizer.encode(text) for text in texts)


def template_facts(folder: Path) -> dict[str, Any]:
    """The chat templates of a model's folder; nothing where it has none."""
    named = templates_of(folder)
    facts: dict[str, Any] = {TEMPLATE: named["default"]} if "default" in named else {}
    if FOR_TOOLS in named:
        facts |= {f"{TEMPLATE}s": [FOR_TOOLS], f"{TEMPLATE}.{FOR_TOOLS}": named[FOR_TOOLS]}
    return facts
