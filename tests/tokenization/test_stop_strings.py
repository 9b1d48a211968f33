from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tokenization.detokenizer import StopFinder, StopStrings

stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)
chunks = st.lists(st.text(alphabet="ab\nc", max_size=5), max_size=12)


def run(finder: StopFinder, pieces: list[str]) -> tuple[list[str], str | None]:
    emitted = []
    for piece in pieces:
        text, stop = finder.feed(piece)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
    return [*emitted, finder.flush()], None


def first_stop(text: str, strings: list[str]) -> tuple[int, str] | None:
    """By the book: at each end in turn, the longest string that stands there."""
    for end in range(1, len(text) + 1):
        if here := [s for s in strings if text[:end].endswith(s)]:
            return end, max(here, key=len)
    return None


@given(stops, chunks, st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_chunks_are_cut_where_the_whole_text_is(strings: list[str], pieces: list[str], include: bool) -> None:
    whole = "".join(pieces)
    emitted, stop = run(StopFinder(StopStrings(strings), include=include), pieces)
    expected = first_stop(whole, strings)
    if expected is None:
        assert (stop, "".join(emitted)) == (None, whole)
    else:
        end, string = expected
        assert stop == string
        assert "".join(emitted) == whole[: end if include else end - len(string)]


@given(stops, chunks)
@settings(max_examples=200, deadline=None)
def test_only_what_may_still_become_a_stop_string_is_held(strings: list[str], pieces: list[str]) -> None:
    finder = StopFinder(StopStrings(strings))
    seen = emitted = ""
    for piece in pieces:
        seen += piece
        text, stop = finder.feed(piece)
        emitted += text
        if stop is not None:
            break
        held = seen[len(emitted) :]
        possible = [e for e in range(len(seen) + 1) if any(s.startswith(seen[e:]) and s != seen[e:] for s in strings)]
        assert held == seen[min(possible) :]


def test_nothing_of_a_stop_string_leaks_when_it_comes_letter_by_letter() -> None:
    finder = StopFinder(StopStrings(["</answer>"]))
    emitted = [finder.feed(c) for c in "42 < 43</answer>"]
    assert "".join(t.text for t in emitted) == "42 < 43"
    assert emitted[-1].stop == "</answer>"


def test_a_false_start_is_emitted_as_soon_as_it_is_one() -> None:
    finder = StopFinder(StopStrings(["\n\nUser:"]))
    assert finder.feed("hi\n") == ("hi", None)
    assert finder.feed("\n\nU") == ("\n", None)
    assert finder.feed("p") == ("\n\nUp", None)


def test_stop_strings_are_text_not_patterns() -> None:
    finder = StopFinder(StopStrings([".*"]))
    assert finder.feed("a.b") == ("a.b", None)
    assert finder.feed(re.escape("x") + ".*y") == ("x", ".*")


def test_without_stop_strings_text_passes_through() -> None:
    finder = StopFinder(StopStrings(()))
    assert (finder.feed("anything"), finder.flush()) == (("anything", None), "")
