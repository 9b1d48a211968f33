"""Prompts that fill in between two texts, as token ids."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from quire.errors import InvalidRequest
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.vocabulary import byte_level, sentencepiece

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
SANTACODER = ("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")


def marked(*names: str, special: bool = True, core: tokenizers.Tokenizer | None = None) -> Tokenizer:
    core = byte_level() if core is None else core
    (core.add_special_tokens if special else core.add_tokens)(list(names))
    return Tokenizer(core, {"bos_token": "<|begin|>"})


def ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [id for id in map(tokenizer.id_of, names) if id is not None]


@pytest.mark.parametrize("names", [QWEN, STARCODER, DEEPSEEK, SANTACODER])
@pytest.mark.parametrize("special", [True, False])
def test_a_prompt_is_markers_around_the_texts(names: tuple[str, str, str], special: bool) -> None:
    tokenizer = marked(*names, special=special)
    prefix, suffix, middle = ids(tokenizer, *names)
    before, after = map(tokenizer.encode, ("the dog\n  a", ") the boat\n"))
    assert tokenizer.encode("the dog\n  a", suffix=") the boat\n") == (prefix, *before, suffix, *after, middle)
    assert tokenizer.encode("", suffix="a") == (prefix, suffix, *tokenizer.encode("a"), middle)
    assert tokenizer.encode("the dog", suffix="") == tokenizer.encode("the dog")


@pytest.mark.parametrize("special", [True, False])
def test_codestrals_suffix_goes_first_and_its_middle_has_no_marker(special: bool) -> None:
    tokenizer = marked(*CODESTRAL, "[MIDDLE]", special=special, core=sentencepiece())
    prefix, suffix = ids(tokenizer, *CODESTRAL)
    before = tokenizer.encode("a dog")
    assert before[0] == tokenizer.id_of("▁")
    assert tokenizer.encode("a dog", suffix="do g") == (suffix, *ids(tokenizer, "do", "▁", "g"), prefix, *before)
    assert tokenizer.encode("", suffix="do") == (suffix, *ids(tokenizer, "do"), prefix)
    written = tokenizer.encode("a[SUFFIX]", suffix="[PREFIX]do")
    assert [id for id in written if id in (prefix, suffix)] == [suffix, prefix]


def test_the_begin_token_goes_first_and_no_end_token_follows() -> None:
    core = byte_level()
    frame = [("<|begin|>", 0), ("<|end|>", 1)]
    core.post_processor = TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=frame)
    tokenizer = marked(*QWEN, core=core)
    framed = tokenizer.encode("the", suffix="dog")
    assert framed[0] == 0 and framed[-1] == tokenizer.id_of("<|fim_middle|>") and 1 not in framed
    assert framed[1:] == tokenizer.encode("the", suffix="dog", add_special_tokens=False)


def test_only_a_prefix_has_the_space_that_sentencepiece_puts_before_a_text() -> None:
    tokenizer = marked(*CODE_LLAMA, core=sentencepiece())
    prefix, suffix, middle = ids(tokenizer, *CODE_LLAMA)
    for text, after in (("do g", ("do", "▁", "g")), (" do", ("▁", "do"))):
        before = tokenizer.encode("a dog")
        assert before[0] == tokenizer.id_of("▁")
        assert tokenizer.encode("a dog", suffix=text) == (prefix, *before, suffix, *ids(tokenizer, *after), middle)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("names", [QWEN, STARCODER, DEEPSEEK, CODE_LLAMA, SANTACODER])
def test_markers_in_the_texts_are_text(names: tuple[str, str, str], special: bool) -> None:
    tokenizer = marked(*names, special=special, core=sentencepiece() if names is CODE_LLAMA else byte_level())
    markers = ids(tokenizer, *names)
    for written in (*names, *(name.replace("▁", " ") for name in names)):
        for text in (written, f"the{written}{written}dog", f"{written} a", "the " + written):
            found = tokenizer.encode(text, suffix=text)
            assert [id for id in found if id in markers] == markers
            at = found.index(markers[1])
            plain = text.replace("▁", " ") if names is CODE_LLAMA else text
            assert tokenizer.decode(found[1:at]) == plain
            assert tokenizer.decode((*tokenizer.encode("a"), *found[at + 1 : -1])) == "a" + plain


def test_other_special_tokens_in_the_texts_are_read_as_in_any_prompt() -> None:
    tokenizer = marked(*QWEN, "<|file_sep|>")
    assert tokenizer.id_of("<|file_sep|>") in tokenizer.encode("a<|file_sep|>the", suffix="dog")


def test_long_texts_are_encoded_like_short_ones() -> None:
    tokenizer = marked(*QWEN)
    text = "the dog\n" * 3000
    prefix, suffix, middle = ids(tokenizer, *QWEN)
    assert tokenizer.encode(text, suffix=text) == (
        *(prefix, *tokenizer.encode(text)),
        *(suffix, *tokenizer.encode(text), middle),
    )


def test_the_tokens_that_end_a_middle_are_those_that_the_vocabulary_has() -> None:
    assert marked(*QWEN).infill is not None
    for names, ends in ((QWEN, ("<|fim_pad|>", "<|file_sep|>")), (CODE_LLAMA, ("▁<EOT>",)), (DEEPSEEK, ())):
        tokenizer = marked(*names, *ends)
        assert tokenizer.infill is not None and sorted(tokenizer.infill.ends) == sorted(ids(tokenizer, *ends))


@pytest.mark.parametrize("names", [(), QWEN[:2], CODESTRAL[:1], ("<PRE>", "<SUF>", "<MID>")])
def test_a_vocabulary_without_markers_fills_nothing_in(names: tuple[str, ...]) -> None:
    tokenizer = marked(*names)
    assert tokenizer.infill is None
    with pytest.raises(InvalidRequest, match="no markers to fill in") as refused:
        tokenizer.encode("the", suffix="dog")
    assert refused.value.param == "suffix"
