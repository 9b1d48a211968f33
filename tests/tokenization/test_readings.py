"""Texts of all kinds as tokens, and tokens as text and bytes, in vocabularies of each kind, as written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.errors import InvalidModel
from quire.tokenization.tokenizer import Tokenizer, _ids, sampling_defaults
from tests.expected import check
from tests.tokenization.vocabulary import CHATML, byte_level, save, sentencepiece, wordpiece

EXPECTED = Path(__file__).parent / "expected"
NAMES = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
KINDS: dict[str, Any] = {
    "bytes": lambda: Tokenizer(byte_level(), NAMES, eos=(3,)),
    "bytes-begun": lambda: Tokenizer(byte_level(), NAMES | {"add_bos_token": True, "add_eos_token": True}),
    "sentencepiece": lambda: Tokenizer(sentencepiece(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "sentencepiece-unstripped": lambda: Tokenizer(sentencepiece(strip=False)),
    "wordpiece": lambda: Tokenizer(wordpiece()),
}
TEXTS = ["", " ", "the dog", " the  dog ", "\n", "né e€5 😀", "a<|end|>b", "日x", "dogs running", "\ufffd", "<s>the"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cut_and_put_together_as_written_down(kind: str) -> None:
    own = KINDS[kind]()
    lines = [f"{own.vocab_size} special {sorted(own.special)} bos {own.bos} eos {sorted(own.eos)} exact {own.exact}"]
    lines.append(f"{own.tokens} {own.id_of('the')} {own.id_of(' the')} {own.id_of('<|im_end|>')}")
    for text in TEXTS:
        ids, bare = own.encode(text), own.encode(text, add_special_tokens=False)
        lines.append(f"{text!r} {ids} {bare} {own.decode(ids)!r} {own.decode(ids, skip_special_tokens=True)!r}")
        for skip in (True, False):
            for context in ((), bare[:2]):
                live = own.detokenizer(skip_special_tokens=skip, context=context)
                lines.append(
                    f"  {skip} {context} {[live.feed((one,)) for one in ids]} {live.flush()!r} {live.flush()!r}"
                )
    tokens = [*range(0, own.vocab_size, max(1, own.vocab_size // 40)), own.vocab_size, own.vocab_size + 9]
    lines += [f"{token} {own.token_text(token)} {own.decode((token,))!r}" for token in tokens]
    lines += [f"{size}: {own.doubts(size)}" for size in (1, own.vocab_size - 1, own.vocab_size, 2 * own.vocab_size)]
    check(EXPECTED / f"{kind}.txt", "\n".join(lines))


FOLDERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ends": {"tokenizer_config": NAMES, "generation_config": {"eos_token_id": [3, 2]}, "config": {"eos_token_id": 0}},
    "an end": {"tokenizer_config": {"eos_token": None}, "generation_config": {}, "config": {"eos_token_id": 3}},
    "no ends": {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 3}},
    "ends of another type": {"generation_config": {"eos_token_id": "x"}},
    "a list of another type": {"generation_config": {"eos_token_id": [1, "x"]}},
    "true": {"generation_config": {"eos_token_id": True}},
    "a name that is none": {"tokenizer_config": {"eos_token": 5}},
    "an unknown token": {"tokenizer_config": {"eos_token": "<nothing>"}},
    "a list": {"tokenizer_config": [1]},
    "added": {"tokenizer_config": {"added_tokens_decoder": {"401": {"content": "<x>", "special": True}}}},
    "added elsewhere": {"tokenizer_config": {"added_tokens_decoder": {"409": {"content": "<x>"}}}},
    "added nonsense": {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}},
    "begun": {"tokenizer_config": NAMES | {"add_bos_token": True, "add_eos_token": True}},
    "not begun": {"tokenizer_config": NAMES | {"add_bos_token": False}},
    "a template": {"tokenizer_config": NAMES | {"chat_template": CHATML}},
}


def test_folders_are_read_as_written_down(tmp_path: Path) -> None:
    lines = []
    for i, (name, files) in enumerate(FOLDERS.items()):
        folder = tmp_path / str(i)
        folder.mkdir()
        save(folder, byte_level(), **files)
        try:
            own = Tokenizer.from_folder(folder)
            said = f"bos {own.bos} eos {sorted(own.eos)} {own.tokens} {own.encode('a')} special {sorted(own.special)}"
        except InvalidModel as error:
            said = f"refused: {error}".replace(str(folder), "FOLDER")
        lines.append(f"{name}: {said}")
    check(EXPECTED / "folders.txt", "\n".join(lines))


DEFAULTS: list[Any] = [
    {},
    {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "max_new_tokens": 9},
    {"do_sample": False, "temperature": 0.5},
    {"do_sample": True, "temperature": 0.5, "num_beams": 4},
    {"temperature": None, "top_k": 0, "seed": 4, "presence_penalty": 1.0},
    {"temperature": "hot"},
    {"top_p": 0},
    {"max_length": 20},
    {"max_new_tokens": 0},
    {"min_new_tokens": 2},
    [1],
]


def test_defaults_of_checkpoints_are_read_as_written_down(tmp_path: Path) -> None:
    lines = []
    for given in DEFAULTS:
        save(tmp_path, byte_level(), generation_config=given)
        try:
            said = str(sampling_defaults(tmp_path))
        except InvalidModel as error:
            said = f"refused: {error}".replace(str(tmp_path), "FOLDER")
        lines.append(f"{given} -> {said}")
    check(EXPECTED / "defaults.txt", "\n".join(lines))


def test_ends_may_be_one_several_or_none() -> None:
    assert [_ids(given) for given in (None, 5, [5, 6], [])] == [[], [5], [5, 6], []]
    assert isinstance(byte_level(), tokenizers.Tokenizer)
