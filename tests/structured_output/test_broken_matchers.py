"""Matchers that break in the middle, and tokenizers whose marks are not special for grammars."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from quire.structured_output.call_rules import escaped
from quire.structured_output.llguidance import (
    UNKNOWN,
    Beginning,
    Matcher,
    TimeBudget,
    _TokenizerAdapter,
    vocabulary,
    with_mask_inside,
)
from quire.structured_output.thought_budget import ThoughtBudget
from quire.token_masks import mask_table
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.vocabulary import byte_level


class Failing:
    """The library's matcher, which allows tokens 0 to 3, and has failed from the `last`-th mask or token on."""

    def __init__(self, last: int) -> None:
        self.left, self.calls = last, list[str]()

    def _count(self, what: str) -> bool:
        self.calls.append(what)
        self.left -= 1
        return self.left >= 0

    def compute_bitmask(self) -> bytes:
        self._count("mask")
        return b"\x0f\0\0\0"

    def consume_token(self, token: int) -> bool:
        return self._count(f"token {token}")

    def rollback(self, count: int) -> None:
        self.calls.append(f"back {count}")

    def reset(self) -> None:
        self.calls.append("reset")

    def is_error(self) -> bool:
        return self.left < 0

    def get_error(self) -> str:
        return ""


def matcher(last: int) -> tuple[Any, Failing]:
    inner = Failing(last)
    return Matcher(inner, frozenset({3}), 4, TimeBudget(clock=lambda: 0.0)), inner


def test_a_matcher_that_fails_while_it_makes_a_mask_allows_nothing_and_says_why() -> None:
    found, inner = matcher(0)
    assert found.masks([], []) == [b""] and found.why() == "it cannot be followed any further"
    assert found.masks([], [1]) == [b""] and inner.calls == ["mask"], "it is not asked again"


def test_a_matcher_refuses_a_token_of_the_answer() -> None:
    found, inner = matcher(1)
    assert found.masks([1, 2], []) == [b""] and found.why() == "the answer left it"
    assert inner.calls == ["token 1", "token 2"]


def test_drafts_are_walked_and_taken_back_and_end_at_the_end_of_the_text() -> None:
    found, inner = matcher(99)
    masks = found.masks([1], [2, 0, 3, 3])
    end = masks[-1]
    assert masks == [b"\x0f\0\0\0"] * 3 + [end] * 2 and end == b"\x08"
    assert inner.calls == ["token 1", "mask", "token 2", "mask", "token 0", "mask", "back 2"]
    assert found.masks([1], [9, 2]) == [b"\x0f\0\0\0"], "a draft that is not allowed is the last"
    assert inner.calls[-1] == "mask"
    assert found.masks([1, 3, 2], [1]) == [end], "the text is over, and the draft is not its end"
    assert found.masks([2], []) == [b"\x0f\0\0\0"] and inner.calls[-3:] == ["reset", "token 2", "mask"]


def test_masks_that_the_library_wrote_hold_up_to_the_first_draft_that_is_not_allowed() -> None:
    found, inner = matcher(99)
    lines = np.full((5, 1), 0b0111, np.int32)
    assert found.collect(lines, 1, [2, 3, 1]) == 2 and lines[:, 0].tolist() == [7] * 5
    lines[2] = 0b1000
    assert found.collect(lines, 1, [2, 3, 3]) == 4 and lines[:, 0].tolist() == [7, 7, 8, 8, 8]
    assert found.drafts_to_walk([2, 3, 1]) == [2] and found.drafts_to_walk([2, 1]) == [2, 1]
    inner.left = -1
    assert found.collect(lines, 2, [2, 1]) == 1 and lines[:, 0].tolist() == [7, 7, 0, 8, 8]
    assert found.why() == "it cannot be followed any further"


@pytest.mark.parametrize(
    ("last", "filled", "why"), [(2, 1, "the answer left it"), (3, 1, "it cannot"), (0, 0, "it cannot")]
)
def test_a_matcher_that_fails_while_it_fills_memory_has_no_mask_there_and_says_why(
    last: int, filled: int, why: str
) -> None:
    found, inner = matcher(last)
    inner.unsafe_compute_mask_ptr = lambda *where: inner._count(f"fill {where}")  # type: ignore[attr-defined]
    outputs = [[1], [1, 2]] if last else [[]]
    assert [found.fill([7, *output], 1, 64) for output in outputs] == [True] * filled + [False] * (
        len(outputs) - filled
    )
    assert found.mask() == b"" and found.why().startswith(why)
    assert "fill (64, 4)" in inner.calls


def test_an_answer_that_ends_needs_no_mask_of_the_library() -> None:
    found, inner = matcher(99)
    inner.unsafe_compute_mask_ptr = lambda *where: inner._count("fill")  # type: ignore[attr-defined]
    assert [found.fill([1, 2, 3, 1][:n], 0, 64) for n in range(5)] == [True, True, True, False, False]
    assert found.mask() == b"\x08"
    assert found.fill([2], 0, 64), "another answer"
    assert inner.calls == ["fill", "token 1", "fill", "token 2", "fill", "reset", "token 2", "fill"]


def test_a_grammar_asks_for_the_mask_in_a_text_before_its_answers_do() -> None:
    """The library keeps that mask, also for copies, until another is made."""

    class Copied(Failing):
        def deep_copy(self) -> Copied:
            self.inside = Copied(self.left)
            return self.inside

        def rollback(self, count: int) -> bool:  # type: ignore[override]
            super().rollback(count)
            return True

    begun, masks = Beginning((2,), (b"\x04", b"\x2d")), ["token 3", "mask", "back 1"]
    outer = Copied(99)
    assert with_mask_inside(outer, begun, frozenset({5})) is outer.inside and outer.inside.calls == masks  # type: ignore[arg-type]
    for last in (0, 1):  # the library fails: answers begin from the matcher as it was
        outer = Copied(last)
        assert with_mask_inside(outer, begun, frozenset({5})) is outer  # type: ignore[arg-type]
    for known in (UNKNOWN, Beginning((), (b"\x20",))):  # nothing is known, or only the end may follow
        assert with_mask_inside(outer, known, frozenset({5})) is outer  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("mark", ["</think>", "<|channel|>", "[THINK]", "</think:6124c78e>", "<tool_sep>"])
def test_marks_that_are_tokens_are_text_in_grammars(mark: str, special: bool) -> None:
    """Qwen 3's `</think>` is one token, and not special; other models' are."""
    core = byte_level()
    (core.add_special_tokens if special else core.add_tokens)([mark, "<other>"])
    tokenizer = Tokenizer(core, {"eos_token": "<|end|>"})
    own, first, second = vocabulary(tokenizer), core.token_to_id(mark), core.token_to_id("<other>")
    matcher = LLMatcher(own, LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: /(?s:.*){escaped(mark)}/"))
    assert _bit(matcher.compute_bitmask(), first)
    assert not own.is_special_token(first) and own.is_special_token(second) == special
    # Texts that a grammar determines are cut as the tokenizer does.
    text = f'the "city" of{mark}there'
    assert own.tokenize_str(text) == list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("word", ["d", "assistant", "thought", "["])
def test_special_tokens_that_are_words_within_marks_are_no_text(word: str) -> None:
    """A "d" would be allowed in any text, and would be missing in what a client reads."""
    core = byte_level()
    core.add_special_tokens([word])
    own, special = vocabulary(Tokenizer(core, {"eos_token": "<|end|>"})), core.token_to_id(word)
    matcher = LLMatcher(own, LLMatcher.grammar_from_lark("start: /(?s:.*)/"))
    assert own.is_special_token(special) and not _bit(matcher.compute_bitmask(), special)


def _bit(mask: bytes, token: int) -> int:
    return mask[token >> 3] >> (token & 7) & 1


def test_text_is_cut_as_the_tokenizer_does_up_to_a_special_token() -> None:
    """Where its tokens are another text, into the longest that are not special."""

    class Tokens:
        bos, eos, special = 1, frozenset({6, 5}), frozenset({3, 4, 5, 7})
        cut: Mapping[str, tuple[int, ...]] = MappingProxyType({"ab": (0, 6), "ab#a": (0, 6, 4, 0), "abc": (1,)})

        def encode_inner(self, text: str) -> tuple[int, ...]:
            return self.cut.get(text, (3,))

    pieces = [b"a", b"ab", b"abc", b"", b"#", b"~", b"b", b"</think>"]
    made = _TokenizerAdapter(Tokens(), pieces)  # type: ignore[arg-type]
    assert (made.bos_token_id, made.eos_token_id, made.special_token_ids) == (1, 5, [3, 4, 5])
    assert made(b"ab") == [0, 6] and made(b"ab#a") == [0, 6], "# is special: what comes before it"
    assert made(b"abc") == [2] and made(b"abcab</think>a") == [2, 1, 7, 0] and made(b"b") == [6]
    assert made(b"ab~#a") == [1], "~ ends a text"


def test_masks_of_spans_are_lines_of_one_table() -> None:
    table = mask_table([[b"\x01", None], [], [b"\x02\x03\0\0\x07\x08\x09\x0a\x0b"]], 2)
    assert table.lines.shape == (2, 2) and table.places == [[0, -1], [], [1]] and len(table) == 3
    assert table[0] == [b"\x01" + b"\0" * 7, None] and table[2] == [b"\x02\x03\0\0\x07\x08\x09\x0a"]
    assert table[1:] == [[], table[2]] and [*table] == table[:]


@pytest.mark.parametrize("why", ["", "it left"])
def test_a_budget_of_thoughts_says_what_its_constraint_says(why: str) -> None:
    class Inner:
        def why(self) -> str:
            return why

        def beginning(self) -> tuple[int, ...]:
            return (1,)

    budgeted = ThoughtBudget.__new__(ThoughtBudget)
    budgeted._inner = Inner()  # type: ignore[assignment]
    assert budgeted.why() == why and budgeted.beginning() == ()
