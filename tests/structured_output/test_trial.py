"""Grammars that would end or occupy the engine's process do so in another one, and are refused in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from quire.errors import InvalidRequest
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.structured_output.source import grammar_source
from quire.structured_output.trial import FewTokens, Trial, Trials
from quire.types import StructuredOutputsParams
from tests.structured_output.little import END, compiler, tokenizer

DEEP = 5000
CHAIN = "\n".join(f'x{i}: x{i + 1} "a"' for i in range(DEEP)) + f'\nx{DEEP}: "b"'
REFS = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(DEEP)} | {f"a{DEEP}": {"type": "integer"}}


@pytest.fixture
def trials() -> Any:
    made = Trials()
    yield made
    made.close()


def structure(**asked: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**asked, param="response_format")


def few() -> FewTokens:
    return FewTokens(300, [END], {END: b"<end>", 299: b"<mark>"})


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": "start: x0\n" + CHAIN},
        {"grammar": "start: <mark> x0\n" + CHAIN},
        {"grammar": "start: <[290-299]> x0\n" + CHAIN},
        {"grammar": f'start: %json {{"type": "integer", "minimum": -{1 << 63}, "maximum": -{1 << 63}}}'},
        {"json": {"$defs": REFS, "$ref": "#/$defs/a0"}},
    ],
    ids=["rules", "a special token", "a token by number", "a range of integers", "references"],
)
def test_a_grammar_that_overflows_the_compilers_stack_is_refused(trials: Trials, asked: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^response_format: compiling it takes too much memory, or nests too deep"
    ):
        trials(structure(**asked), few)
    assert trials(structure(regex="a"), few) == grammar_source(structure(regex="a"))


def test_a_grammar_that_takes_too_long_is_refused_and_no_longer_computed() -> None:
    trials = Trials(timeout=0.05)
    with pytest.raises(InvalidRequest, match="compiling it takes longer than"):
        trials(structure(json={"type": "number", "multipleOf": 999983}), few)
    trials.close()


def test_what_can_be_compiled_or_is_refused_is_as_without_a_trial(trials: Trials) -> None:
    asked: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"regex": "(a|b)+", "thoughts": "open"},
        {"regex": "("},
    ]
    assert [trials(structure(**one), few) for one in asked] == [grammar_source(structure(**one)) for one in asked]
    for refused in ({"json": {"not": {"const": 1}}}, {"grammar": "{::="}):
        with pytest.raises(InvalidRequest) as ours:
            grammar_source(structure(**refused))
        with pytest.raises(InvalidRequest) as theirs:
            trials(structure(**refused), few)
        assert (str(theirs.value), theirs.value.param, theirs.value.code) == (
            str(ours.value),
            ours.value.param,
            ours.value.code,
        )


def test_a_process_serves_many_and_one_that_others_kill_is_replaced() -> None:
    started: list[Trial] = []

    def start(timeout: float, tokens: FewTokens) -> Trial:
        started.append(Trial(timeout, tokens))
        return started[-1]

    trials = Trials(start=start)
    assert [trials(structure(regex=text), few) for text in "ab"] and len(started) == 1
    os.kill(started[0].process.pid, signal.SIGKILL)
    assert trials(structure(regex="c"), few) == grammar_source(structure(regex="c"))
    assert len(started) == 2 and started[0].process.poll() == -signal.SIGKILL
    trials.close()
    assert started[1].process.poll() is not None


def test_where_no_process_can_be_started_or_none_works_grammars_are_compiled_without() -> None:
    def none(timeout: float, tokens: FewTokens) -> Trial:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    class Broken(Trial):
        def __init__(self, timeout: float, tokens: FewTokens) -> None:
            super().__init__(timeout, FewTokens(0, [], {}))

    for start in (none, Broken):
        assert Trials(start=start)(structure(regex="a"), few) == grammar_source(structure(regex="a"))


def test_what_ended_a_process_is_refused_where_no_other_can_be_started() -> None:
    """The engine would be the next that it ends."""
    begun: list[Any] = [lambda structure: -signal.SIGSEGV]

    def start(timeout: float, tokens: FewTokens) -> Any:
        if not begun:
            raise OSError("no process")
        return begun.pop()

    with pytest.raises(InvalidRequest, match="too much memory, or nests too deep"):
        Trials(start=start)(structure(regex="a"), few)


def test_the_compiler_gives_its_special_tokens_to_the_trial() -> None:
    seen: list[FewTokens] = []

    def source(asked: StructuredOutputsParams, tokens: Callable[[], FewTokens]) -> str:
        seen.append(tokens())
        return grammar_source(asked)

    LlguidanceCompiler(tokenizer, source)(structure(regex="a"))
    assert seen[0].size == tokenizer().vocab_size and seen[0].eos == [END] and seen[0].special[END] == b"<end>"
    assert b"a" not in seen[0].special.values()


def test_an_llm_survives_such_a_grammar_and_ends_the_process_with_itself() -> None:
    from quire import SamplingParams

    with LLM("embedded", dtype="float32") as llm:
        with pytest.raises(InvalidRequest, match="nests too deep"):
            llm.generate("a", SamplingParams(structured_outputs=structure(grammar="start: x0\n" + CHAIN)))
        params = SamplingParams(max_tokens=4, structured_outputs=structure(choice=["yes"]))
        assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].text == "yes"
        (waiting,) = llm._trials._idle
    assert waiting.process.poll() is not None


BEYOND = 1 << 53


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [BEYOND, BEYOND + 3, (1 << 63) - 1, (1 << 63) - 1000, 1 << 64, 10**30])
@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_that_floats_do_not_hold_allow_nothing_beyond_them(keyword: str, bound: int, sign: int) -> None:
    bound *= sign
    lower, exclusive = keyword.endswith("inimum"), keyword.startswith("exclusive")
    asked = StructuredOutputsParams(json={"type": "integer", keyword: bound})
    if lower == (sign > 0):
        with pytest.raises(InvalidRequest, match=f"{keyword} in the schema must be .* than -?2\\^53: numbers beyond"):
            compiler()(asked)
        return
    beyond = bound + (1 if sign > 0 else -1)
    follow = compiler()(asked)
    assert follows(follow(), str(sign * 5))
    assert not follows(follow(), str(beyond))
    assert not exclusive or not follows(follow(), str(bound))


def follows(matcher: Any, text: str) -> bool:
    from tests.structured_output.little import allowed, tokens_of

    tokens = [*tokens_of(text), END]
    return all(token in allowed(matcher.masks(tokens[:i], ())[0]) for i, token in enumerate(tokens))


def test_keywords_that_restrict_nothing_are_taken() -> None:
    free = {"uniqueItems": False, "propertyNames": {"type": "string"}, "not": False}
    asked = {"type": "array", **free, "items": {"type": "integer", "uniqueItems": False}}
    follow = compiler()(StructuredOutputsParams(json=asked))
    assert follows(follow(), "[1,1]")
