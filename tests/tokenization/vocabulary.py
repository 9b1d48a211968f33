"""Tiny vocabularies of both kinds that language models use, made in milliseconds."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog. " * 8, "once upon a time, there was a dog and a boat. " * 8]
CORPUS += ["héllo wörld, €5 for 日本 😀👩‍👩‍👧 привет. " * 8]
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _byte_level_json() -> str:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens(["né e"])
    return str(core.to_str())


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: ids 0 to 3 are special, and one added token is not."""
    return tokenizers.Tokenizer.from_str(_byte_level_json())


def sentencepiece(*, strip: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's kind: low lines for spaces, byte fallback, and a space put before every text."""
    words = ["▁", "▁the", "▁dog", "▁a", "the", "d", "o", "g", "s", "é", "▁▁", "a", "日"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    merges = [("d", "o")]
    vocab["do"] = len(vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def wordpiece() -> tokenizers.Tokenizer:
    """A decoder that is more than its tokens' bytes end to end."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "the", "dog", "##s", "a", "boat", "##ing", "run"])}
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(cleanup=False)
    return core


def save(folder: Path, core: tokenizers.Tokenizer, **files: object) -> Path:
    """A model folder: tokenizer.json and the named JSON files beside it."""
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder
