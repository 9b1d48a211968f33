from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tokenization.detokenizer import Detokenizer, WindowDetokenizer
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.vocabulary import byte_level, sentencepiece, wordpiece

BYTES = Tokenizer(byte_level())
PIECES = Tokenizer(sentencepiece())


def emitted(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """What is emitted when `tokens` come in chunks that end at `cuts`."""
    ends = [0, *sorted(c % (len(tokens) + 1) for c in cuts), len(tokens)]
    texts = [detokenizer.feed(tokens[a:b]) for a, b in itertools.pairwise(ends)]
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_tokens_in_any_chunks_make_the_same_text_as_the_whole(
    tokenizer: Tokenizer, skip: bool, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    context = list(tokenizer.encode("the"))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, context=context)
    before = tokenizer.decode(context, skip_special_tokens=skip)
    whole = tokenizer.decode(context + tokens, skip_special_tokens=skip)
    assert before + "".join(emitted(detokenizer, tokens, cuts)) == whole


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 80), max_size=20))
@settings(max_examples=150, deadline=None)
def test_text_comes_back_and_no_chunk_has_half_a_character(text: str, cuts: list[int]) -> None:
    tokens = list(BYTES.encode(text.replace("�", "")))
    texts = emitted(BYTES.detokenizer(), tokens, cuts)
    assert "�" not in "".join(texts)
    assert "".join(texts) == BYTES.decode(tokens)


def test_a_character_of_four_tokens_is_emitted_when_it_is_complete() -> None:
    detokenizer = BYTES.detokenizer()
    tokens = [BYTES.id_of(c) or 0 for c in "ðŁĲ¸"]  # the frog, byte by byte
    assert [detokenizer.feed([t]) for t in tokens] == ["", "", "", "🐸"]


def test_a_character_cut_off_at_the_end_is_emitted_once_as_a_replacement() -> None:
    detokenizer = BYTES.detokenizer()
    tokens = [BYTES.id_of(c) or 0 for c in "ðŁ"]
    assert detokenizer.feed(tokens) == ""
    assert detokenizer.flush() == "�" == BYTES.decode(tokens)
    assert detokenizer.flush() == ""


def test_sentencepiece_keeps_the_space_between_prompt_and_answer() -> None:
    prompt, answer = PIECES.encode("the"), PIECES.id_of("▁dog")
    assert answer is not None
    assert PIECES.detokenizer(context=prompt).feed([answer]) == " dog"
    assert PIECES.decode([answer]) == "dog"


def test_the_library_agrees_on_whole_texts() -> None:
    for core in (byte_level(), sentencepiece(), sentencepiece(strip=False)):
        tokenizer = Tokenizer(core)
        for text in ("the dogs", " the  dog", "日本 é 😀", "", "<|end|>a"):
            ids = core.encode(text).ids
            assert tokenizer.decode(ids) == core.decode(ids, skip_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=True) == core.decode(ids, skip_special_tokens=True)


@given(words=st.lists(st.integers(0, 7), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=8))
@settings(max_examples=60, deadline=None)
def test_other_decoders_are_followed_through_a_window(words: list[int], cuts: list[int]) -> None:
    tokenizer = Tokenizer(wordpiece())
    context = [1, 2]
    texts = emitted(tokenizer.detokenizer(context=context), words, cuts)
    assert tokenizer.decode(context) + "".join(texts) == tokenizer.decode(context + words)


@given(text=st.text(alphabet="the dogs é日本😀", max_size=30), cuts=st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_window_never_emits_half_a_character(text: str, cuts: list[int]) -> None:
    core = sentencepiece(strip=False)
    tokens = core.encode(text).ids
    texts = emitted(WindowDetokenizer(lambda ids: str(core.decode(list(ids)))), tokens, cuts)
    assert "".join(texts) == core.decode(tokens)
    assert "�" not in "".join(texts)


def test_a_window_does_not_wait_for_ever_for_bytes_that_are_no_character() -> None:
    core = sentencepiece(strip=False)
    detokenizer = WindowDetokenizer(lambda ids: str(core.decode(list(ids))))
    assert any(detokenizer.feed([3 + 0x80]) for _ in range(20))


@pytest.mark.parametrize("before", [0, 1, 15, 16, 40])
def test_a_window_waits_for_a_whole_character_however_long_the_prompt_was(before: int) -> None:
    core = sentencepiece(strip=False)
    detokenizer = WindowDetokenizer(lambda ids: str(core.decode(list(ids))), [core.token_to_id("a")] * before)
    assert [detokenizer.feed([3 + byte]) for byte in "🐸".encode()] == ["", "", "", "🐸"]


@pytest.mark.parametrize("tokenizer", [BYTES, Tokenizer(wordpiece())], ids=["bytes", "window"])
def test_a_token_costs_the_same_at_the_end_of_a_long_text(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()

    def cost() -> float:
        start = time.thread_time()
        for _ in range(500):
            detokenizer.feed([5])
        return time.thread_time() - start

    early = min(cost() for _ in range(4))
    for _ in range(4):
        detokenizer.feed([5] * 5000)
    assert min(cost() for _ in range(4)) < 5 * early
