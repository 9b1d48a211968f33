from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import BertProcessing, RobertaProcessing, TemplateProcessing

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.tokenizer import Tokenizer, sampling_defaults
from tests.tokenization.vocabulary import byte_level, save, sentencepiece, wordpiece

NAMES = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}


def with_bos() -> Tokenizer:
    core = byte_level()
    core.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return Tokenizer(core, NAMES)


def test_its_configuration_is_shown_as_transformers_shows_it() -> None:
    config = {
        **NAMES,
        "vocab_file": "/home/someone/vocab.json",
        "added_tokens_decoder": {"3": {"content": "<|im_end|>", "special": True}},
        "additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>", "lstrip": False}],
        "model_max_length": 128,
    }
    assert Tokenizer(byte_level(), config).info() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "added_tokens_decoder": {"3": "<|im_end|>"},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": 128,
    }
    assert Tokenizer(byte_level(), {"tokenizer_class": "Qwen2Tokenizer"}).info() == {
        "tokenizer_class": "Qwen2Tokenizer"
    }


def test_text_survives_the_round_trip() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "the lazy dog\n\tcosts 5€ 👩‍👩‍👧 né e"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff", "a\ud800" * 20_000])
def test_text_with_surrogates_is_refused_as_that(text: str) -> None:
    """Names of files that are no UTF-8 have them: the library said "TextInputSequence must be str"."""
    tokenizer = Tokenizer(byte_level())
    for encode in (tokenizer.encode, tokenizer.encode_inner, lambda text: tokenizer.encode_inputs(["a", text])):
        with pytest.raises(InvalidRequest, match=r"has a surrogate, which is no character"):
            encode(text)


def test_long_texts_encode_like_short_ones() -> None:
    tokenizer = Tokenizer(byte_level())
    line = "the dog\n" * 3000
    assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.encode(line)[:200] == tokenizer.encode(line[:4000])[:200]


@pytest.mark.parametrize("size", [16_383, 16_384])
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_its_begin_token_once_or_not_at_all(size: int, special: bool) -> None:
    tokenizer = with_bos()
    ids = tokenizer.encode(("the dog " * 4000)[:size], add_special_tokens=special)
    assert ids.count(0) == special and (ids[0] == 0) == special


def test_a_tokenizer_of_another_size_than_the_models_may_be_another_models() -> None:
    tokenizer = Tokenizer(byte_level())
    size = tokenizer.vocab_size
    assert [tokenizer.doubts(padded) for padded in (size, size + 3, size * 4 // 3)] == ["", "", ""]
    assert f"has {size} tokens and the model {size - 1}: prompts" in tokenizer.doubts(size - 1)
    assert "what the model says with the others is lost" in tokenizer.doubts(2 * size)


def test_special_ids_come_from_the_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), tokenizer_config=NAMES, generation_config={"eos_token_id": [3, 1]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos == 0
    assert tokenizer.eos == {1, 3}
    assert tokenizer.special == {0, 1, 2, 3}
    assert tokenizer.tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_end_ids_fall_back_on_the_model_config(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(save(tmp_path, byte_level(), config={"eos_token_id": 3})).eos == {3}


def test_the_begin_token_stands_before_a_text_only_when_wanted() -> None:
    tokenizer = with_bos()
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == (0, *plain)
    assert tokenizer.encode("") == (0,)


@pytest.mark.parametrize("begun", [True, False])
def test_the_config_decides_about_the_begin_token(begun: bool) -> None:
    for tokenizer in (byte_level(), with_bos()._core):
        made = Tokenizer(tokenizer, {**NAMES, "add_bos_token": begun})
        assert (made.encode("the")[0] == 0) == begun


def test_a_token_is_shown_with_its_exact_bytes() -> None:
    tokenizer = Tokenizer(byte_level())
    half = tokenizer.id_of("ðŁ")
    if half is None:
        half = tokenizer.id_of("ð")
    assert half is not None
    text, data = tokenizer.token_text(half)
    assert data.startswith(b"\xf0")
    assert text == "�"
    assert tokenizer.token_text(1) == ("<|end|>", b"<|end|>")
    assert tokenizer.token_text(tokenizer.vocab_size + 7) == ("", b"")


def test_sentencepiece_tokens_have_bytes_too() -> None:
    tokenizer = Tokenizer(sentencepiece())
    assert tokenizer.token_text(3 + 0xE2) == ("�", b"\xe2")
    assert tokenizer.token_text(tokenizer.id_of("▁dog") or 0) == (" dog", b" dog")
    assert Tokenizer(wordpiece()).token_text(2) == ("dog", b"dog")


def test_special_tokens_are_text_only_on_request() -> None:
    tokenizer = Tokenizer(byte_level())
    tokens = (*tokenizer.encode("the"), 1)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "the"
    assert tokenizer.decode(tokens) == "the<|end|>"


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    declared = {str(size): {"content": "<|tool|>", "special": True, "normalized": False}}
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": declared}))
    assert tokenizer.encode("<|tool|>") == (size,)
    assert size in tokenizer.special


def test_a_declared_token_that_cannot_have_its_id_is_an_error() -> None:
    with pytest.raises(InvalidModel, match=r"'<\|tool\|>' the id 9999"):
        Tokenizer(byte_level(), {"added_tokens_decoder": {"9999": {"content": "<|tool|>"}}})


@pytest.mark.parametrize("declared", [[1], {"x": {"content": "a"}}, {"1": {}}, {"1": 3}, {"1": []}, {"1": None}])
def test_a_table_of_added_tokens_that_makes_no_sense_is_an_error(declared: object) -> None:
    with pytest.raises(InvalidModel, match="added_tokens_decoder must map ids to tokens"):
        Tokenizer(byte_level(), {"added_tokens_decoder": declared})


def test_a_file_nested_without_end_is_named(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidModel, match=r"generation_config\.json is not JSON"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("broken", ["tokenizer", "tokenizer_config", "generation_config"])
def test_a_broken_file_is_named(tmp_path: Path, broken: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / f"{broken}.json").write_text("{nope")
    with pytest.raises(InvalidModel, match=broken):
        Tokenizer.from_folder(tmp_path)


def test_sampling_defaults_are_the_ones_the_checkpoint_names(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), generation_config={"temperature": 0.6, "max_new_tokens": 64, "do_sample": True})
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "max_tokens": 64}


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "the quick brown fox " * 50_000
    turns, done = 0, threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


PROCESSORS = {
    "none": None,
    "bert": BertProcessing(("<|end|>", 1), ("<|begin|>", 0)),
    "roberta": RobertaProcessing(("<|end|>", 1), ("<|begin|>", 0)),
    "turned": TemplateProcessing(
        single="$A", pair="<|begin|>:3 $B:2 <|end|>:4 $A:1", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("most", [None, 7])
def test_pairs_are_framed_as_the_post_processor_says(name: str, special: bool, most: int | None) -> None:
    core = byte_level()
    if PROCESSORS[name] is not None:
        core.post_processor = PROCESSORS[name]
    pairs = [("the dog", "a lazy dog"), ("the dog", ""), ("", "the")]
    made = Tokenizer(core).encode_inputs(pairs, add_special_tokens=special, most=most)
    for pair, one in zip(pairs, made, strict=True):
        if most is not None:
            core.enable_truncation(most, strategy="longest_first")
        wanted = core.encode(*pair, add_special_tokens=special)
        core.no_truncation()
        assert (list(one.ids), list(one.types)) == (wanted.ids, wanted.type_ids)


class Counted:
    """A tokenizer's core that counts the characters it encodes."""

    def __init__(self, core: Any) -> None:
        self.core, self.characters = core, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.core.encode_batch_fast(texts, **options)


def test_a_query_is_encoded_once_for_all_its_documents() -> None:
    counted = Counted(byte_level())
    query = "the dog " * 5000
    made = Tokenizer(counted).encode_inputs([(query, "a dog")] * 1000, most=16)  # type: ignore[arg-type]
    assert counted.characters == len(query) + len("a dog")
    assert {len(one.ids) for one in made} == {16}
    assert len({one.truncated for one in made}) == 1 and made[0].truncated > 9000
