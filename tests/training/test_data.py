"""No held-out story is trained on, and requests tell the truth about their story."""

from __future__ import annotations

import lzma
import random
from pathlib import Path

import pytest

from tests.training import little
from training import data
from training.batches import IGNORE, RowMaker, batched
from training.requests import (
    Lexicon,
    build_lexicon,
    draw_nouns,
    draw_pairs,
    draw_request,
    facts_of,
    is_reserved,
    mentions,
)
from training.tokenizer import train_tokenizer


@pytest.fixture
def parts(tmp_path: Path) -> dict[data.Part, data.Corpus]:
    arguments = little.files(tmp_path)
    return data.load([Path(arguments[1])], [Path(arguments[3])], [Path(arguments[5])])


@pytest.fixture
def lexicon() -> Lexicon:
    # every noun is in a sixth of these stories, fewer than would make it too common to tell them apart
    return build_lexicon(little.stories())


def test_no_story_is_in_two_parts_whichever_file_it_comes_from(parts: dict[data.Part, data.Corpus]) -> None:
    replies = {name: {data.normalise(chat[-1]["content"]) for chat in part.chats} for name, part in parts.items()}
    told = {name: {data.normalise(story) for story in part.stories} for name, part in parts.items()}
    assert told == replies  # the chat file says the same stories in capitals
    assert all(told.values())
    assert sum(map(len, told.values())) == len(set().union(*told.values())) == 280


@pytest.mark.parametrize("copy", ["A  dog\nran.", "a dog ran", "A DOG, ran!!"])
def test_a_copy_goes_where_the_original_goes(copy: str) -> None:
    assert data.part_of(copy) == data.part_of("A dog ran.")


def test_one_held_out_reply_holds_out_the_conversation() -> None:
    held_out = next(story for story in little.stories() if data.part_of(story) == "held_out")
    trained = next(story for story in little.stories() if data.part_of(story) == "train")
    chat = [data.Message(role="assistant", content=text) for text in (trained, held_out, trained)]
    assert data.part_of_chat(chat) == "held_out"
    assert data.part_of_chat(chat[:1]) == "train"


def test_compressed_text_and_a_separator_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress("One é.\n***\n\nTwo.\n***\nONE É!\n".encode()))
    assert data.read_documents(path, "***") == ["ONE É!", "Two."]


@pytest.mark.parametrize("bad", ['{"turns": []}', "not JSON", '{"messages": [{"role": "tool", "content": "x"}]}'])
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(f'{{"messages": [{{"role": "assistant", "content": "x"}}]}}\n\n{bad}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 3"):
        data.read_chats(path)


def test_nouns_are_found_without_a_list_of_them(lexicon: Lexicon) -> None:
    assert set(little.NOUNS) <= set(lexicon)
    assert not {"was", "had", "lost", "said", "sad", "once"} & set(lexicon)


def test_requests_ask_for_nouns_of_the_story_and_never_for_a_reserved_pair(lexicon: Lexicon) -> None:
    rng = random.Random(0)
    asked = 0
    for story in little.stories():
        facts = facts_of(story, lexicon, 280)
        request = draw_request(facts, rng)
        assert request is not None
        assert all(mentions(story, noun.word) and noun.phrase in request.text for noun in request.nouns)
        first, *others = draw_nouns(facts, 3, rng)
        assert not any(is_reserved(first.word, other.word) for other in others)
        asked += len(request.nouns)
    assert asked > 280


def test_pairs_for_evaluation_and_for_training_never_meet(lexicon: Lexicon) -> None:
    kept = draw_pairs(lexicon, 30, random.Random(0), reserved=True, min_documents=1)
    drawn = draw_pairs(lexicon, 30, random.Random(0), reserved=False, min_documents=1)
    assert kept
    assert drawn
    assert not {frozenset(pair) for pair in kept} & {frozenset(pair) for pair in drawn}


@pytest.mark.parametrize(
    ("story", "noun", "found"),
    [
        ("Two dogs ran.", "dog", True),
        ("Dog!", "dog", True),
        ("Ponies", "pony", True),
        ("dogged", "dog", False),
        ("box", "bo", False),
    ],
)
def test_a_mention_is_a_word_of_its_own(story: str, noun: str, found: bool) -> None:
    assert mentions(story, noun) is found


def test_rows_learn_answers_only_and_weigh_the_first_mention(parts: dict[data.Part, data.Corpus]) -> None:
    corpus = parts["train"]
    codec = train_tokenizer(corpus.texts(), 400)
    rows = RowMaker(codec, corpus, build_lexicon(corpus.stories), context=256, reply_tokens=200, noun_weight=10)
    heavy = 0
    for row in rows.chat_rows(random.Random(3)):
        learned = codec.decode(token for token, weight in zip(row.tokens, row.weights, strict=True) if weight)
        assert "story about" not in learned
        assert learned.endswith("<|end|>")
        text = codec.decode(token for token, weight in zip(row.tokens, row.weights, strict=True) if weight > 1)
        heavy += any(noun in text.lower() for noun in little.NOUNS)
    assert heavy > 50


def test_batches_lose_no_token(parts: dict[data.Part, data.Corpus]) -> None:
    corpus = parts["train"]
    codec = train_tokenizer(corpus.texts(), 400)
    rows = RowMaker(codec, corpus, build_lexicon(corpus.stories), context=256).epoch(random.Random(1))
    assert max(len(row.tokens) for row in rows) <= 256
    batches = list(batched(rows, 1024, codec.end_of_text, random.Random(1)))
    wanted = sum(weight > 0 for row in rows for weight in row.weights[1:])
    assert sum(int((batch.targets != IGNORE).sum()) for batch in batches) == wanted
    assert all(batch.inputs.size <= 1024 or len(batch.inputs) == 1 for batch in batches)
