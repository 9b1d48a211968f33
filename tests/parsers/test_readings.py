"""Answers of all kinds and what each parser reads in them, whole and in pieces, as written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.parsers.parts import Splitter, TextPart, joined, possible
from quire.parsers.reasoning import AnswerSplitter, ReasoningCounter, Thinking
from quire.parsers.tools.reader import python_calls
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.rendering import calls_text, describe_tools
from quire.parsers.tools.styles import STYLES
from tests.expected import check

OLDEST: tuple[str, ...] = ("hermes", "llama3_json", "mistral", "gemma")
"""Parsers whose readings are written down here; all of them: `test_families`."""

EXPECTED = Path(__file__).parent / "expected"
TOOLS: dict[str, dict[str, Any]] = {"weather": {"city": {}, "days": {}}, "now": {}}
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "days": [1, {"a": null}]}}'
PARAMETERS = WEATHER.replace("arguments", "parameters")
TEXTS = [
    "",
    "plain text",
    f"<tool_call>\n{WEATHER}\n</tool_call>",
    f'So: <tool_call>{WEATHER}</tool_call><tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call> done',
    '<tool_call>{"arguments": {"city": "x"}, "name": "weather"}</tool_call>',
    '<tool_call>{"name": "never", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
    f"<tool_call>{WEATHER[:40]}",
    "a < b <tool_cal",
    PARAMETERS,
    f"{PARAMETERS}; {PARAMETERS}",
    f"<|python_tag|>{PARAMETERS}",
    '{"name": "other", "parameters": {}}',
    f"[TOOL_CALLS][{WEATHER}, {WEATHER}]",
    '[TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}',
    f"[{WEATHER}]",
    "[TOOL_CALLS]",
    '```tool_code\nweather("Oslo", days=2)\nnow()\n```',
    '```tool_code\nprint(weather(city="Oslo"))\n```\nand more ```json\n{"name": "now", "parameters": {}}\n```',
    f"```json\n{PARAMETERS}\n```",
    '```json\n{"a": 1}\n```',
    '[weather(city="x"), now()]',
    "```tool_code\nimport os\n```",
    "```tool_call\n" + PARAMETERS + "\n```",
    "Hm.\n</think>\n\nSo it is.",
    "<think>\nHm.\n</think>\n\nSo it is.<think>again</think>",
    "<think>no end",
    f"<think>a</think>\n<tool_call>{WEATHER}</tool_call>",
    "</think></think>x",
]


def fed(splitter: Splitter, text: str, size: int) -> list[TextPart]:
    parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
    return joined([*parts, *splitter.flush()])


def shown(parts: list[TextPart]) -> str:
    return " | ".join(f"{part.kind} {part.call} {part.text!r}" for part in parts)


@pytest.mark.parametrize("name", OLDEST)
def test_calls_are_read_as_written_down(name: str) -> None:
    lines = []
    for text in TEXTS:
        for most in (1 << 30, 1):
            whole = fed(reader_of(STYLES[name], TOOLS, most=most), text, 10_000)
            assert {shown(fed(reader_of(STYLES[name], TOOLS, most=most), text, size)) for size in (1, 2, 7)} == {
                shown(whole)
            }
            lines.append(f"{text!r} {'' if most > 1 else '(one)'}\n  {whole}")
    check(EXPECTED / f"calls-{name}.txt", "\n".join(lines))


def test_thoughts_are_read_as_written_down() -> None:
    lines = []
    for text in TEXTS[-6:] + TEXTS[:3]:
        for inside in (True, False):

            def make(inside: bool = inside) -> Splitter:
                return AnswerSplitter(Thinking(inside=inside), reader_of(STYLES["hermes"], TOOLS))

            whole = fed(make(), text, 10_000)
            assert {shown(fed(make(), text, size)) for size in (1, 2, 7)} == {shown(whole)}
            counter = ReasoningCounter(inside=inside)
            for at in range(0, len(text), 3):
                if not counter.over:
                    counter.feed([text[at : at + 3]])
            lines.append(
                f"{inside} {text!r}\n  {shown(whole)}\n  {counter.count} pieces of thoughts, over {counter.over}"
            )
    check(EXPECTED / "thoughts.txt", "\n".join(lines))


SOURCES = """
now() & weather('x') & weather('x', 2) & weather('x', 2, 3) & weather(days=1, city='x') & weather(town='x')
print(now()) & [now(), now()] & x = now() & now();now() & now(*a) & never() & now().x & 1 & now( & a.now() & now(**a)
weather(None, True) & weather(-1.5, [1, (2,)]) & weather({'a': {1: 2}}) & weather(b'x') & weather('x', city='y')
"""


def test_python_is_read_as_written_down() -> None:
    sources = ["", *(source.strip() for line in SOURCES.strip().split("\n") for source in line.split("&"))]
    check(EXPECTED / "python.txt", "\n".join(f"{source!r} -> {python_calls(source, TOOLS)}" for source in sources))


def test_white_space_around_python_says_nothing() -> None:
    assert python_calls("  \n now()\n\n ", TOOLS) == [("now", "{}")]


def test_tools_and_calls_are_told_to_models_as_written_down() -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "it's", "parameters": {"type": "object"}}}]
    calls = [{"id": "c1", "function": {"name": "now", "arguments": {"a": 1}}}] * 2
    talks: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "q"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "a"}],
        [],
    ]
    lines = []
    for style in (STYLES[name] for name in OLDEST):
        lines += [f"{style.name} {calls_text(calls, style)!r} {style.head('x')!r}"]
        lines += [f"  {describe_tools(talk, tools, style)}" for talk in talks]
    check(EXPECTED / "told.txt", "\n".join(lines))


def test_what_may_become_a_mark_is_held_back() -> None:
    marks = ("<tool_call>", "<think>", "```")
    texts = ("", "a", "a<", "a<t", "a<tool_call", "a<thinx", "<<", "``", "x`", "<think>")
    assert [possible(text, marks) for text in texts] == [0, 0, 1, 2, 10, 0, 1, 2, 1, 0]
