"""Lines that a pattern matches: found in time linear in what is searched, and taken out of the first message only."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.errors import InvalidConfig
from quire.tokenization import prompt_header
from quire.tokenization.prompt_header import MAX_EXAMINED, MAX_REMOVED, PromptHeader

BILL = "x-bill: .*"


def system(content: Any, role: str = "system") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}, {"role": "user", "content": "x-bill: mine"}]


@pytest.mark.parametrize(
    ("pattern", "content", "left", "text"),
    [
        (BILL, "x-bill: 1\nrest", "rest", "x-bill: 1"),
        (BILL, "x-bill: 1\n\nrest\n", "\nrest\n", "x-bill: 1"),
        (BILL, "a\nx-bill: é\r\nb", "a\nb", "x-bill: é\r"),
        (BILL, "a\nx-bill: \udc80\nb", None, ""),
        (BILL, "a\nx-bill: 2", "a", "x-bill: 2"),
        (BILL, "a x-bill: 2\nb", None, ""),
        (
            f"{BILL}|Today: [0-9-]+",
            "x-bill: 1\nToday: 2026-11-24\nToday: soon",
            "Today: soon",
            "x-bill: 1\nToday: 2026-11-24",
        ),
        ("(?i)X-BILL: [a-z]", "x-bill: Q\n.", ".", "x-bill: Q"),
        ("^x-bill: 1$", "x-bill: 1\n.", ".", "x-bill: 1"),
        ("", "x-bill: 1\nrest", None, ""),
    ],
)
def test_lines_that_match_as_a_whole_are_taken_out(pattern: str, content: str, left: str | None, text: str) -> None:
    for role in ("system", "developer", "user"):
        messages = system(content, role)
        made = PromptHeader(pattern).remove(messages)
        assert made.messages == (messages if left is None else system(left, role))
        assert (made.outcome, made.text) == ((None, "") if left is None else ("removed", text))
        assert messages == system(content, role), "the request itself is changed"
    assert PromptHeader(pattern).remove(system(content, "assistant")).outcome is None


@pytest.mark.parametrize("content", [None, 3, {}, [], [None, 3, {"text": 5}, {"type": "image"}], ["x-bill: 1"]])
def test_what_is_no_text_stays_as_it_is(content: Any) -> None:
    assert PromptHeader(BILL).remove(system(content)).messages == system(content)
    assert PromptHeader(BILL).remove([{}]).messages == [{}] and PromptHeader(BILL).remove([]).messages == []


def test_a_message_is_searched_up_to_a_bound_over_all_its_parts() -> None:
    header = PromptHeader(BILL)
    filler = "y" * 100 + "\n"
    near, far = filler * 100 + "x-bill: 1\nend", filler * 200 + "x-bill: 1\nend"
    assert len(near) < MAX_EXAMINED < len(far)
    assert header.remove(system(near)).outcome == "removed"
    assert header.remove(system(far)).outcome is None
    cut = "y" * (MAX_EXAMINED - 12) + "\nx-bill: and what is behind the bound"
    assert header.remove(system(cut)).messages == system(cut), "half a line is taken for a line"
    for parts, outcome in (([filler * 50, "x-bill: 1", "end"], "removed"), ([filler * 200, "x-bill: 1"], None)):
        assert header.remove(system([{"type": "text", "text": text} for text in parts])).outcome == outcome


def test_at_most_so_many_characters_are_taken_out() -> None:
    for length, outcome in ((MAX_REMOVED, "removed"), (MAX_REMOVED + 1, "too_long")):
        line = "x-bill: " + "1" * (length - 8)
        assert PromptHeader(BILL).remove(system(line + "\nend")).outcome == outcome
    for content in ("x-bill: 1", "x-bill: 1\n \n", [{"type": "text", "text": "x-bill: 1"}]):
        made = PromptHeader(BILL).remove(system(content))
        assert (made.outcome, made.messages) == ("whole", system(content))


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("[", "unclosed character class"),
        ("a(?=b)", "look-around"),
        (r"(a)\1", "backreferences"),
        ("a\nb", "line break"),
        (".*", "matches an empty line"),
        ("x?|y*", "matches an empty line"),
    ],
)
def test_a_pattern_that_cannot_mean_a_header_is_refused_at_the_start(pattern: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(says)) as refused:
        PromptHeader(pattern)
    assert refused.value.param == "prompt_header"


HOSTILE = [
    "(a+)+b",
    "(a|a)*b",
    "(a|aa)+b?c",
    "(.*a){12}b",
    "(a|b)*a(a|b){30}",
    "([ab]+[ab]?)*c",
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_no_pattern_makes_a_line_cost_more_than_its_length(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library walks each byte once, so what is fed is counted: Python's own `re` would not end on some of these."""
    fed = []
    matches = prompt_header._matches
    monkeypatch.setattr(
        prompt_header, "_matches", lambda matcher, line: fed.append(len(line)) or matches(matcher, line)
    )
    lines = ["a" * 500, "ab" * 250, "b" * 500] * 4000
    made = PromptHeader(pattern).remove(system("\n".join(lines)))
    assert made.outcome in (None, "too_long") and sum(fed) <= MAX_EXAMINED
