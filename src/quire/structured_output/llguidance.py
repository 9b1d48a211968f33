"""Schemas, expressions and grammars compiled by llguidance, within bounds on size, depth and work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from quire.errors import InvalidModel, InvalidRequest
from quire.parsers.reasoning import CLOSE, OPEN
from quire.structured_output.matcher import Matcher, reason
from quire.structured_output.schema import check_schema
from quire.structured_output.vocabulary import vocabulary
from quire.tokenization.tokenizer import Tokenizer
from quire.types import StructuredOutputsParams

SPACE = " "
"""White space allowed by default where JSON may have some: models write it, and no model can go on with it for ever."""

_FIRST = 0.1
"""Processor seconds the first mask may take."""

_AHEAD = 8
"""Tokens of one possible answer that are tried: most grammars that are too wide are so near their beginning."""

_COERCE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class LlguidanceGrammar:
    """A grammar ready to be matched, any number of times. What is learnt while matching is shared."""

    def __init__(self, first: LLMatcher, eos: frozenset[int]) -> None:
        self._first, self._eos = first, eos

    def constraint(self) -> Matcher:
        """A constraint for one sequence, at its beginning. Microseconds."""
        return Matcher(self._first.deep_copy(), self._eos)


class LlguidanceCompiler:
    """Compiles for one tokenizer, which is read when the first grammar is wanted."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], *, clock: Callable[[], float] = time.thread_time) -> None:
        self._read, self._clock = tokenizer, clock

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._read()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return vocabulary(self._tokenizer)

    def __call__(self, structure: StructuredOutputsParams) -> LlguidanceGrammar:
        """Raises InvalidRequest naming the field it came in, with the compiler's own words."""
        try:
            source = _after_thoughts(structure)
            first = LLMatcher(self._vocabulary, source, log_level=0, limits=_limits())
        except InvalidModel as error:
            raise InvalidRequest(f"{structure.param}: {error}", param=structure.param) from error
        except (ValueError, RecursionError) as error:
            raise _refusal(structure, str(error)) from error
        began = self._clock()
        mask = first.compute_bitmask()
        if first.is_error():
            raise _refusal(structure, first.get_error())
        if self._clock() - began > _FIRST:
            raise _refusal(structure, "it is too complex")
        if not any(mask):
            raise _refusal(structure, "nothing can satisfy it")
        if why := _ahead(first.deep_copy(), mask, self._tokenizer.eos):
            raise _refusal(structure, why)
        return LlguidanceGrammar(first, self._tokenizer.eos)


def _ahead(matcher: LLMatcher, mask: bytes, eos: frozenset[int]) -> str:
    """Why the grammar cannot be followed through one of the answers it allows; empty if nothing is found."""
    for _ in range(_AHEAD):
        bits = int.from_bytes(mask, "little") & ~sum(1 << token for token in eos)
        if not bits or matcher.is_stopped():
            return ""
        matcher.consume_token((bits & -bits).bit_length() - 1)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
    return ""


def _limits() -> LLParserLimits:
    """Below the library's own: a step's work is every row's delay."""
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _source(structure: StructuredOutputsParams) -> str:
    """The library's own notation of a grammar."""
    kind, text = structure.kind
    if kind == "json":
        schema = json.loads(text)
        check_schema(schema, structure.param)
        compact = structure.disable_any_whitespace
        white = None if compact else structure.whitespace_pattern or SPACE
        options = {"whitespace_flexible": white is not None, "whitespace_pattern": white, "lenient": False}
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    if kind == "choice":  # as one terminal: of alternatives in a rule, each is followed by itself
        texts = " | ".join(map(json.dumps, json.loads(text)))
        return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + texts))
    return str(grammar_from(kind, text))


_THOUGHTS = f"""
thoughts[suffix={json.dumps(CLOSE)}]: /(?s:.*)/
SPACE: /\\n{{0,2}}/
"""


def _after_thoughts(structure: StructuredOutputsParams) -> str:
    """The structure's grammar, after thoughts if there may be some: any text up to their end. Names do not mix."""
    source, ahead = _source(structure), structure.thoughts
    if ahead == "none":
        return source
    as_json = structure.kind[0] in ("json", "regex")
    answer = json.loads(source)["grammars"][0] if as_json else {"lark_grammar": source}
    thoughts = "thoughts SPACE" if ahead == "open" else f"({json.dumps(OPEN)} thoughts SPACE)?"
    whole = {"lark_grammar": f"start: {thoughts} @answer{_THOUGHTS}"}
    return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]})


def _refusal(structure: StructuredOutputsParams, why: str) -> InvalidRequest:
    what = {"json": "the JSON schema", "regex": "the regular expression", "choice": "the choice"}
    if why.startswith("NoExtension"):
        why = "nothing can satisfy it"
    said = reason(why.replace(_COERCE, "Use anyOf"))
    name = what.get(structure.kind[0], "the grammar")
    return InvalidRequest(f"{structure.param}: {name} cannot be used: {said}", param=structure.param)
