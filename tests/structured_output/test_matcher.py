"""A matcher's masks are a function of the tokens before them, however it is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import repeat

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.scheduler.constraint import FREE, MaskRequest
from quire.scheduler.plan import Mask
from quire.structured_output import llguidance
from quire.structured_output.llguidance import EMPTY_MASK, LlguidanceCompiler, Matcher, ParallelMasks, TimeBudget
from quire.token_masks import MaskTable
from quire.tokenization.tokenizer import Tokenizer
from quire.types import StructuredOutputsParams
from tests.model_runner.tiny import VOCAB
from tests.structured_output.little import END, allowed, compiler, tokens_of

STRUCTURES = (
    StructuredOutputsParams(regex="(ab|b){2,5}1*"),
    StructuredOutputsParams(choice=("a", "ab", "abc", "bad")),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "ab", 12, True]}, "maxItems": 3}),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(grammar='start: "{" inner* "}"\ninner: "a" | "[" inner "]"'),
)
TEXT = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})


def fresh(structure: StructuredOutputsParams) -> Matcher:
    return compiler()(structure)()


def one_by_one(structure: StructuredOutputsParams, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
    """What a matcher that never drafts says, each asked of a new one."""
    tokens = [*output, *drafts]
    return [fresh(structure).masks(tokens[:upto], ())[0] for upto in range(len(output), len(tokens) + 1)]


@st.composite
def walks(draw: st.DrawFn) -> tuple[StructuredOutputsParams, list[int], list[int]]:
    """A structure, an output it allows, and drafts of which some are wrong."""
    structure = draw(st.sampled_from(STRUCTURES))
    matcher, output = fresh(structure), list[int]()
    for _ in range(draw(st.integers(0, 10))):
        output.append(draw(st.sampled_from(sorted(allowed(matcher.masks(output, ())[0])))))
        if output[-1] == END:
            break
    drafts: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        choices = sorted(allowed(matcher.masks([*output, *drafts], ())[0])) or [END]
        drafts.append(draw(st.sampled_from(choices) if draw(st.booleans()) else st.integers(0, VOCAB - 1)))
    return structure, output, drafts


@pytest.mark.parametrize("structure", STRUCTURES)
def test_masks_follow_from_the_output_whatever_was_asked_before(structure: StructuredOutputsParams) -> None:
    """Outputs that grow, are cut, and whose last token is another; most tokens are the same few."""
    ran = random.Random(7)
    asked, output = fresh(structure), list[int]()
    for _ in range(80):
        known = fresh(structure).masks(output, ())[0]
        choices = sorted(allowed(known))[:4] or [END]
        if len(output) > 5 or ran.random() < 0.2:
            output = output[: ran.randrange(len(output) + 1)]
        elif output and ran.random() < 0.4:
            before = sorted(allowed(fresh(structure).masks(output[:-1], ())[0]))
            output = [*output[:-1], ran.choice(before[:4])]
        else:
            output = [*output, ran.choice(choices)]
        assert asked.masks(output, ()) == fresh(structure).masks(output, ()), output


@given(st.lists(walks(), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_masks_made_together_are_those_made_one_by_one(
    several: list[tuple[StructuredOutputsParams, list[int], list[int]]],
) -> None:
    together = ParallelMasks(2)
    matchers = [fresh(structure) for structure, _, _ in several]
    for part in (0.5, 1.0):
        outputs = [output[: int(part * len(output))] for _, output, _ in several]
        drafts = [walked if part == 1.0 else [] for _, _, walked in several]
        together._measure = False
        got = together([*zip(matchers, outputs, repeat(0), drafts, strict=False), (FREE, (), 0, drafts[0])])
        assert got[len(several)] == [None] * (1 + len(drafts[0]))
        for i, (structure, _, _) in enumerate(several):
            want = one_by_one(structure, outputs[i], drafts[i])
            held = len(fresh(structure).masks(outputs[i], drafts[i]))
            assert [sorted(allowed(mask)) for mask in got[i][:held]] == [sorted(allowed(mask)) for mask in want[:held]]
            assert got[i][held:] == [None] * (len(drafts[i]) + 1 - held)


def test_a_slow_grammar_among_others_is_measured_and_ended() -> None:
    """Time passes only where this matcher is asked."""
    now = [0.0]
    quick, slow = fresh(STRUCTURES[0]), fresh(STRUCTURES[0])
    slow = Matcher(slow._matcher.deep_copy(), frozenset({END}), slow.mask_bytes, TimeBudget(clock=lambda: now[0]))
    follow = slow.follow

    def late(tokens: Sequence[int], begin: int, drafts: Sequence[int]) -> object:
        now[0] += 0.2
        return follow(tokens, begin, drafts)

    slow.follow = late  # type: ignore[method-assign, assignment]
    together = ParallelMasks(1, clock=lambda: now[0], cpu_clock=lambda: now[0])
    for _ in range(8):
        made = together([(quick, (), 0, ()), (slow, (), 0, ())])
    assert list(made[1]) == [EMPTY_MASK]
    assert made[0][0] == fresh(STRUCTURES[0]).masks((), ())[0]
    assert quick.why() == ""
    assert "too much time" in slow.why()


class Watched:
    """The library's matcher, and how often it has been asked for a mask or given a token."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner, self.masks, self.tokens, self.resets = inner, 0, 0, 0

    def unsafe_compute_mask_ptr(self, *where: int) -> None:
        self.masks += 1
        self.inner.unsafe_compute_mask_ptr(*where)

    def compute_bitmask(self) -> bytes:
        self.masks += 1
        return bytes(self.inner.compute_bitmask())

    def consume_token(self, token: int) -> bool:
        self.tokens += 1
        return bool(self.inner.consume_token(token))

    def reset(self) -> None:
        self.resets += 1
        self.inner.reset()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_a_step_asks_the_library_once_for_each_row_and_not_at_all_where_a_grammar_leaves_no_choice() -> None:
    """All answers of this one begin alike, up to its first text. A call more in each step is a row's share more."""
    structure = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"pattern": "^[bc]{9}$", "type": "string"}}, "required": ["a"]},
        disable_any_whitespace=True,
        disable_additional_properties=True,
    )
    rows = [fresh(structure) for _ in range(3)]
    begins = len(rows[0]._beginning.tokens)
    assert begins >= 4, "the brace, the name and its quotes"
    watched = [Watched(row._matcher) for row in rows]
    for row, each in zip(rows, watched, strict=True):
        row._matcher = each
    together, output = ParallelMasks(1), list[int]()
    seen = []
    while len(output) < 10:
        made = [allowed(masks[0]) for masks in together([(row, output, 0, ()) for row in rows])]
        assert made == [allowed(one_by_one(structure, output, ())[0])] * 3, output
        output = [*output, min(made[0])]
        seen.append([(each.masks, each.tokens, each.resets) for each in watched])
    after = [max(0, step - begins) for step in range(10)]
    assert seen == [[(count, count, 0)] * 3 for count in after]


@pytest.mark.parametrize("structure", [*STRUCTURES, StructuredOutputsParams(regex="1[a-d]*2?"), TEXT])
def test_a_mask_that_is_known_before_answers_begin_changes_none(
    structure: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = compiler()(structure)
    monkeypatch.setattr(llguidance, "with_mask_inside", lambda matcher, *known: matcher)
    without, ran = compiler()(structure), random.Random(5)
    for _ in range(12):
        one, other, output = make(), without(), list[int]()
        while len(output) < 12 and END not in output:
            mask = one.masks(output, ())[0]
            assert mask == other.masks(output, ())[0], output
            output.append(ran.choice(sorted(allowed(mask))))


def test_masks_that_are_alike_are_one_line() -> None:
    """Rows inside a text, of one grammar or several: that is what is copied to a device."""
    texts = [StructuredOutputsParams(regex=f"{first}[a-d]*") for first in ("", "1")]
    for each in (1, 20):
        rows = [fresh(text) for text in texts for _ in range(each)]
        output = [tokens_of("ab")] * each + [tokens_of("1ab")] * each
        masks = ParallelMasks(1, clock=lambda: 0.0)  # none is left to threads
        table = masks([(row, tokens, 0, ()) for row, tokens in zip(rows, output, strict=True)])
        assert isinstance(table, MaskTable)
        assert len(table.lines) == 1 and [*table.places] == [[0]] * 2 * each
    different = [StructuredOutputsParams(regex=f"a*{letter}b") for letter in "abcd12"] * 2
    table = ParallelMasks(1)([(fresh(one), tokens_of("aa"), 0, ()) for one in different])
    assert [allowed(mask) for masks in table for mask in masks] == [
        allowed(one_by_one(one, tokens_of("aa"), ())[0]) for one in different
    ]


@pytest.mark.parametrize(("each", "lines"), [(6e-6, 1), (3e-5, 202)])
def test_usual_masks_of_many_rows_are_not_left_to_threads(each: float, lines: int) -> None:
    """Threads take longer for them, and write a line for each."""
    now, text = [0.0], StructuredOutputsParams(regex="[a-d]*")

    def clock() -> float:
        now[0] += each
        return now[0]

    rows = [fresh(text) for _ in range(300)]
    table = ParallelMasks(1, clock=clock)([(row, tokens_of("ab"), 0, ()) for row in rows])
    assert isinstance(table, MaskTable) and len(table.lines) == lines


def test_drafts_in_what_is_known_of_all_answers_are_walked_by_the_library() -> None:
    structure = StructuredOutputsParams(regex="abba(b|c)")
    (a, b), asked = tokens_of("ab"), ParallelMasks(1)
    for output, drafts in (((), (a, b)), ((a,), (b, b, a)), ((a, b, b, a), (b,)), ((a, b), (a,)), ((a, b, b, a), ())):
        made = asked([(fresh(structure), output, 0, drafts)])[0]
        held = one_by_one(structure, output, drafts)
        for mask, want in zip(made, held, strict=True):
            assert mask is None or allowed(mask) == allowed(want), (output, drafts)
        assert made[0] is not None
    row = fresh(structure)
    assert row.masks((a, a), ()) == [EMPTY_MASK] and row.why(), "what no mask allowed"


@pytest.mark.parametrize(("each", "by_threads"), [(0.0, 0), (4e-4, 2), (2e-3, 4)])
def test_threads_make_the_masks_that_are_left_once_some_were_slow(each: float, by_threads: int) -> None:
    now, given, first = [0.0], list[int](), fresh(STRUCTURES[1])
    matchers = [Matcher(first._matcher.deep_copy(), frozenset({END}), first.mask_bytes) for _ in range(4)]

    def clock() -> float:
        now[0] += each
        return now[0]

    together = ParallelMasks(2, clock=clock)
    executor = together._executor

    class Counted:
        def unsafe_compute_mask_ptr(self, some: list[tuple[LLMatcher, int]], *where: int) -> None:
            given.append(len(some))
            executor.unsafe_compute_mask_ptr(some, *where)

    together.__dict__["_executor"] = Counted()
    made = together([(matcher, (), 0, ()) for matcher in matchers])
    want = [allowed(mask) for mask in matchers[0].masks((), ())]
    assert [[allowed(mask) for mask in masks] for masks in made] == [want] * 4
    assert sum(given) == by_threads


def test_measuring_is_rare_where_no_grammar_is_slow() -> None:
    """Every step takes long, as on a busy machine, and no grammar does."""
    now, measured = [0.0], [0]
    matchers = [fresh(STRUCTURES[0]) for _ in range(2)]
    together = ParallelMasks(1, clock=lambda: now[0], cpu_clock=lambda: now[0])
    make, measure = together._together, together._one_by_one

    def long(requests: Sequence[MaskRequest]) -> Sequence[Sequence[Mask]]:
        now[0] += 1.0
        return make(requests)

    def counted(requests: Sequence[MaskRequest]) -> list[list[Mask]]:
        measured[0] += 1
        return measure(requests)

    together._together, together._one_by_one = long, counted  # type: ignore[method-assign, assignment]
    for _ in range(500):
        together([(matcher, (), 0, ()) for matcher in matchers])
    assert 5 <= measured[0] <= 15


@pytest.mark.parametrize("size", [257, 287, 288, 289])
def test_masks_made_together_fit_vocabularies_of_any_size(size: int) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({**byte_tokens(), **extra_tokens(size)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([f"<{size - 1}>"])
    grammars = LlguidanceCompiler(lambda: Tokenizer(core, {"eos_token": f"<{size - 1}>"}))
    make = grammars(StructuredOutputsParams(regex="[a-f]+"))
    alone = make().masks((), ())[0]
    assert alone is not None
    (mask,) = ParallelMasks(1)([(make(), (), 0, ())])[0]
    assert mask is not None
    assert len(mask) == -(-size // 32) * 4
    assert mask.ljust(len(alone), b"\0") == alone


def test_an_answer_that_has_ended_leaves_the_buffer_of_masks_as_it_is() -> None:
    """Its mask is shorter than the vocabulary, and another buffer would be pinned anew in every such step."""
    together, ended, going = ParallelMasks(1), fresh(STRUCTURES[1]), fresh(STRUCTURES[1])
    together([(going, (), 0, ())])
    lines = together._lines
    answer = [*tokens_of("a"), END]
    for requests in ([(ended, answer, 0, ())], [(going, (), 0, ())], [(FREE, (), 0, ())]):
        made = together(requests)
        assert together._lines is lines
    assert list(made[0]) == [None]
    assert allowed(together([(ended, answer, 0, ())])[0][0]) == {END}


def byte_tokens() -> dict[str, int]:
    return {symbol: i for i, symbol in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}


def extra_tokens(size: int) -> dict[str, int]:
    """Tokens after those of the bytes, up to `size`."""
    return {f"<{i}>": i for i in range(256, size)}


@given(walks(), st.data())
@settings(max_examples=80, deadline=None)
def test_masks_walked_over_drafts_are_those_asked_one_by_one(
    walk: tuple[StructuredOutputsParams, list[int], list[int]], data: st.DataObject
) -> None:
    structure, output, drafts = walk
    want = one_by_one(structure, output, drafts)
    matcher = fresh(structure)
    earlier = data.draw(st.integers(0, len(output)))
    matcher.masks(output[:earlier], drafts)  # as a step before would have asked
    got = matcher.masks(output, drafts)
    assert got == want[: len(got)]
    assert matcher.masks(output, ()) == want[:1], "a walk leaves no trace"
    legal = [draft in allowed(mask) for draft, mask in zip(drafts, want, strict=False)]
    walked = legal.index(False) if False in legal else len(legal)
    assert len(got) == 1 + walked, "every mask up to the first draft that is not allowed"


@given(walks())
@settings(max_examples=60, deadline=None)
def test_an_output_that_is_no_continuation_starts_again(
    walk: tuple[StructuredOutputsParams, list[int], list[int]],
) -> None:
    structure, output, _ = walk
    matcher = fresh(structure)
    matcher.masks(output, ())
    for upto in range(len(output), -1, -1):
        assert matcher.masks(output[:upto], ()) == one_by_one(structure, output[:upto], ())


def test_when_it_is_complete_only_the_end_is_allowed_for_ever_after() -> None:
    matcher = fresh(StructuredOutputsParams(choice=("ab",)))
    assert allowed(matcher.masks(tokens_of("ab"), ())[0]) == {END}
    assert allowed(matcher.masks([*tokens_of("ab"), END], ())[0]) == {END}, "an end that was ignored"
    assert allowed(matcher.masks([*tokens_of("ab"), END, END], (END,))[0]) == {END}


def test_behind_an_end_among_the_drafts_which_may_be_ignored_only_ends_are_walked_and_all_is_taken_back() -> None:
    matcher = fresh(StructuredOutputsParams(regex="a*"))
    made = matcher.masks(tokens_of("a"), [*tokens_of("a"), END, END, *tokens_of("a")])
    assert [allowed(mask) for mask in made[2:]] == [{END}, {END}]
    assert allowed(matcher.masks(tokens_of("aa"), ())[0]) >= {END, *tokens_of("a")}


def test_a_token_that_was_never_allowed_leaves_nothing_allowed_rather_than_an_early_end() -> None:
    matcher = fresh(StructuredOutputsParams(regex="a{5}"))
    assert matcher.masks(tokens_of("ab"), ()) == [EMPTY_MASK]
    assert matcher.masks(tokens_of("ab"), tokens_of("a")) == [EMPTY_MASK]


def test_special_tokens_are_never_part_of_an_answer() -> None:
    mask = fresh(StructuredOutputsParams(grammar="start: /(?s:.*)/")).masks((), ())[0]
    assert max(allowed(mask)) < VOCAB - 1 and END in allowed(mask)
    assert {t for t in allowed(mask) if t > 47} == set()


@pytest.mark.parametrize(("tick", "each", "fails"), [(0.2, 1e-3, True), (1e-4, 1e-3, False), (0.2, 0.25, False)])
def test_masks_that_take_too_long_end_the_answer_and_no_other(tick: float, each: float, fails: bool) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += tick
        return now[0]

    one = compiler()(StructuredOutputsParams(regex="a*"))
    slow = Matcher(one()._matcher.deep_copy(), frozenset({END}), one().mask_bytes, TimeBudget(each=each, clock=clock))
    said = [slow.masks(tokens_of("a" * n), ()) for n in range(8)]
    assert (said[-1] == [EMPTY_MASK]) is fails
    assert one().masks((), ()) != [EMPTY_MASK]
