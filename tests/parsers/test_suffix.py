"""Hy3's and Hy4's marks with the suffix that a checkpoint chooses: found in its vocabulary and used."""

from __future__ import annotations

import pytest
import tokenizers

from quire.parsers.parts import TextPart
from quire.parsers.reasoning import THOUGHTS, AnswerSplitter, thought_style, thoughts_ahead
from quire.parsers.suffix import DECLARED, SUFFIXED, named
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.rendering import calls_text
from quire.parsers.tools.styles import STYLES, tool_style
from quire.tokenization.tokenizer import Tokenizer
from tests.parsers.families import CALLS, TOOLS
from tests.parsers.test_families import calls_in, fed, rendered

FOUND = [({"<think:6124c78e>", "<b>"}, ":6124c78e"), ({"<tool_calls>"}, ""), ({"<arg_key:opensource>"}, DECLARED)]


@pytest.mark.parametrize(("tokens", "suffix"), FOUND)
@pytest.mark.parametrize("parser", sorted(SUFFIXED))
def test_the_suffix_is_that_of_the_vocabulary(parser: str, tokens: set[str], suffix: str) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.add_special_tokens(sorted(tokens))
    name = named(parser, Tokenizer(core).added)
    assert name == (parser if suffix == DECLARED else f"{parser}:{suffix.removeprefix(':')}")
    tools, thoughts = tool_style(name), thought_style(name)
    assert thoughts is not None and thoughts.closes == (f"</think{suffix}>",)
    calls = rendered(parser).replace(DECLARED, suffix)
    text = f"Hm.</think{suffix}>Yes.{calls}"
    for cuts in ([], range(1, len(text)), range(5, len(text), 5)):
        parts = fed(AnswerSplitter(thoughts.splitter(inside=True), reader_of(tools, TOOLS)), text, cuts)
        assert parts[:2] == [TextPart("reasoning", "Hm."), TextPart("content", "Yes.")]
        assert calls_in(parts) == list(CALLS)
    shown = [{"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS]
    assert calls_text(shown, tools) == calls_text(shown, STYLES[parser]).replace(DECLARED, suffix)
    assert thoughts_ahead(name, f"assistant<think{suffix}>\n") == "open"


def test_other_parsers_have_no_suffix() -> None:
    for parser in {*STYLES, *THOUGHTS, "none"} - SUFFIXED:
        assert named(parser, ["<think:6124c78e>"]) == parser
    assert named("hy_v4", []) == "hy_v4"
    assert thought_style("none") is None and thought_style("qwen3") is THOUGHTS["qwen3"]
    with pytest.raises(KeyError):
        tool_style("nothing:x")
