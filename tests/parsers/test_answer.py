"""However an answer is cut into pieces, its parts are the same, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsers.parts import Splitter, TextPart, joined
from quire.parsers.reasoning import AnswerSplitter, ReasoningCounter, Thinking, parser_of, thoughts_ahead
from quire.parsers.tools.reader import python_calls
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.rendering import calls_text, describe_tools
from quire.parsers.tools.styles import STYLES, Style, style_of
from tests.parsers.families import answer_reader

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "now": {},
}

PIECES = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```tool_code", "```json", "```"),
    *("<think>", "</think>", '{"name": "now", "arguments": {}}', '{"name": "get_weather", ', '"arguments": {"city": '),
    *(
        '"parameters": {"days": 3}',
        '"Paris\n"',
        '{"a": [1, -2.5e3, null, "\\u00e9"]}',
        "}",
        "{",
        "[",
        "]",
        ",",
        ";",
        ":",
    ),
    *("now()", 'get_weather("x", days=2)', "now[ARGS]{}", " ", "\n", '"', "\\", "é€😀", "say", "7", "print(", ")"),
)

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join)
cuts = st.lists(st.integers(1, 9), max_size=60)


def tell(splitter: Splitter, text: str, sizes: Sequence[int] = ()) -> list[TextPart]:
    parts: list[TextPart] = []
    for size in sizes:
        parts += splitter.feed(text[:size])
        text = text[size:]
    return joined([*parts, *splitter.feed(text), *splitter.flush()])


def bare(text: str) -> str:
    return "".join(text.split())


SPLITTERS: dict[str, Callable[[], Splitter]] = {
    **{name: lambda style=style: reader_of(style, TOOLS) for name, style in STYLES.items()},  # type: ignore[misc]
    "thinking": lambda: Thinking(inside=True),
    "qwen3": lambda: AnswerSplitter(Thinking(inside=False), reader_of(STYLES["hermes"], TOOLS)),
    "deepseek_r1": lambda: AnswerSplitter(Thinking(inside=True), reader_of(STYLES["llama3_json"], TOOLS)),
}


@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=30, deadline=None)
@given(text=texts, sizes=cuts)
def test_however_a_text_is_cut_the_parts_are_the_same(name: str, text: str, sizes: list[int]) -> None:
    assert tell(SPLITTERS[name](), text, sizes) == tell(SPLITTERS[name](), text)


@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=30, deadline=None)
@given(text=texts)
def test_what_is_no_call_and_no_thought_stays_content_to_the_letter(name: str, text: str) -> None:
    keeps_to_the_letter(name, text)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=500, deadline=None)
@given(text=texts, sizes=cuts)
def test_any_text_in_any_cut_at_length(name: str, text: str, sizes: list[int]) -> None:
    assert tell(SPLITTERS[name](), text, sizes) == tell(SPLITTERS[name](), text)
    keeps_to_the_letter(name, text)


def keeps_to_the_letter(name: str, text: str) -> None:
    parts = tell(SPLITTERS[name](), text)
    if parts and all(part.kind == "content" for part in parts) and "think>" not in text:
        assert "".join(part.text for part in parts) == text
    for part in parts:
        if part.kind == "call":
            assert part.text and part.text in text
    said = [bare(part.text) for part in parts if part.kind in ("content", "reasoning")]
    at = 0
    for one in said:  # in order, and each as it was written
        at = bare(text).index(one, at) + len(one)


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls: Any = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if not getattr(style, "form", None)])
@settings(max_examples=25, deadline=None)
@given(made=calls, sizes=cuts)
def test_calls_that_are_well_written_are_read_as_they_were_meant(
    name: str, made: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    style = STYLES[name]
    text = calls_text([{"function": {"name": tool, "arguments": arguments}} for tool, arguments in made], style)
    parts = tell(answer_reader(style.name, TOOLS), text, sizes)
    assert [(part.kind, part.call) for part in parts] == [
        (kind, i) for i in range(len(made)) for kind in ("call", "arguments")
    ]
    read = [(a.text, json.loads(b.text)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert read == made


Parts = list[tuple[str, str]]
C: str = "content"
CALL: Parts = [("call", "now"), ("arguments", "{}")]

READ: list[tuple[str, str, Parts]] = [
    ("hermes", 'Hi.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', [(C, "Hi."), *CALL]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', CALL),
    ("hermes", '<tool_call>{"arguments": {}, "id": 3, "name": "now"}', CALL),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', CALL),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', CALL),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call> Then.', [*CALL, (C, "Then.")]),
    ("hermes", "<tool_call>now()</tool_call>", [(C, "<tool_call>now()</tool_call>")]),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', [(C, '<tool_call>{"name": 3, "arguments": {}}')]),
    ("hermes", '{"name": "now", "arguments": {}}', [(C, '{"name": "now", "arguments": {}}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1]', [CALL[0], ("arguments", '{"a": 1'), (C, "]")]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', CALL),
    ("llama3_json", ' {"type": "function", "name": "now", "parameters": {}}', CALL),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [*CALL, *CALL]),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', [(C, '{"name": "Ann", "parameters": {}}')]),
    ("llama3_json", '{"name": "now", "age": 3}', [(C, '{"name": "now", "age": 3}')]),
    ("llama3_json", '<|python_tag|>now.call(q="x")', [(C, '<|python_tag|>now.call(q="x")')]),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', CALL),
    ("mistral", "Well.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now{}", [(C, "Well."), *CALL, *CALL]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{}", CALL),
    ("mistral", '[{"name": "now", "arguments": {}}]', CALL),
    ("mistral", "[1, 2] and more", [(C, "[1, 2] and more")]),
    ("gemma", "So:\n```tool_code\nnow()\n```\nDone.", [(C, "So:"), *CALL, (C, "Done.")]),
    ("gemma", "```tool_code\nprint(now())\n```", CALL),
    ("gemma", "```tool_code\nx = now()", CALL),
    ("gemma", "```tool_code\nimport os\n```", [(C, "```tool_code\nimport os\n```")]),
    ("gemma", '```json\n{"name": "now", "parameters": {}}\n```', CALL),
    ("gemma", '```json\n{"a": 1}\n```', [(C, '```json\n{"a": 1}\n```')]),
    ("gemma", "[now(), now()]", [*CALL, *CALL]),
    ("gemma", "[later()]", [(C, "[later()]")]),
    (
        "gemma",
        '[get_weather("Paris", days=2)]',
        [("call", "get_weather"), ("arguments", '{"city": "Paris", "days": 2}')],
    ),
]


@pytest.mark.parametrize(("name", "text", "want"), READ)
def test_each_style_is_read_as_its_family_writes_it(name: str, text: str, want: Parts) -> None:
    assert [(part.kind, part.text) for part in tell(reader_of(STYLES[name], TOOLS), text)] == want


UNCLOSED: list[tuple[str, str, Parts]] = [
    ("hermes", '<tool_call>{"name": "now"}\n</tool_call>', CALL),
    ("hermes", '<tool_call>{"name": "now"}</tool_call></tool_call>', [*CALL, (C, "</tool_call>")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_', CALL),
    ("hermes", '<tool_call>{"name": "now"}</tool_calls', [*CALL, (C, "</tool_calls")]),
    ("hermes", '<tool_call>{"name": "now"} so </tool_call>', [*CALL, (C, "so </tool_call>")]),
    ("hermes", '<tool_call>{"name": "now"}<tool_call>{"name": "now"}</tool_call>', [*CALL, *CALL]),
    ("gemma", '```tool_call\n{"name": "now"}\n```', CALL),
    ("gemma", '```tool_call\n{"name": "now"}\n``', CALL),
    ("gemma", '```tool_call\n{"name": "now"}\n``` ```', [*CALL, (C, "```")]),
    ("gemma", '```tool_call\n{"name": "now"}\n```tool', CALL),
    ("gemma", '```tool_call\n{"name": "now"}```json\n{"name": "now", "parameters": {}}\n```', [*CALL, *CALL]),
    ("gemma", '```tool_call\n{"name": "now"}\n```\n```python\nx\n```', [*CALL, (C, "```python\nx\n```")]),
    ("gemma", "```tool_code\nnow()\n``` ```", [*CALL, (C, "```")]),
]


@pytest.mark.parametrize(("name", "text", "want"), READ + UNCLOSED)
def test_a_mark_may_be_split_anywhere_within_and_behind_a_call(name: str, text: str, want: Parts) -> None:
    for sizes in ([1] * len(text), *([i] for i in range(len(text))), *([i, 1] for i in range(len(text)))):
        assert [(part.kind, part.text) for part in tell(reader_of(STYLES[name], TOOLS), text, sizes)] == want, sizes


def test_arguments_are_emitted_while_they_are_written() -> None:
    reader = reader_of(STYLES["hermes"], TOOLS)
    assert reader.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa') == [
        TextPart("call", "get_weather"),
        TextPart("arguments", '{"city": "Pa'),
    ]
    assert reader.feed('ris"') == [TextPart("arguments", 'ris"')]


@pytest.mark.parametrize("between", ["", " ", "\n\nAnd then:\n"])
def test_after_a_list_of_calls_another_marked_list_is_calls_too(between: str) -> None:
    listed = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    parts = tell(reader_of(STYLES["mistral"], TOOLS), listed + between + listed)
    said = [(C, between.strip())] if between.strip() else []
    assert [(part.kind, part.text) for part in parts] == [*CALL, *said, *CALL]
    assert [part.call for part in parts if part.kind == "call"] == [0, 1]


def test_no_more_calls_are_emitted_than_may_be_made() -> None:
    text = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert [part.kind for part in tell(reader_of(STYLES["mistral"], TOOLS, most=1), text)] == ["call", "arguments"]


@pytest.mark.parametrize("name", ["", "two words", "now()", "x" * 257])
def test_what_is_no_name_of_a_function_begins_no_call(name: str) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}'
    assert tell(reader_of(STYLES["hermes"], TOOLS), text) == [TextPart("content", text)]


def test_the_longest_name_of_a_function_is_one() -> None:
    name = "a.b-c/d:" * 32
    parts = tell(reader_of(STYLES["hermes"], TOOLS), f'<tool_call>{{"name": "{name}", "arguments": {{}}}}')
    assert parts == [TextPart("call", name, 0), TextPart("arguments", "{}", 0)]


@pytest.mark.parametrize("text", ["[get_weather('x', city='y')]", "[get_weather(city='x', city='y')]"])
def test_a_call_with_an_argument_given_twice_is_content(text: str) -> None:
    assert tell(reader_of(STYLES["gemma"], TOOLS), text) == [TextPart("content", text)]


def test_deep_or_endless_arguments_end_a_call_and_are_kept() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000
    parts = tell(reader_of(STYLES["hermes"], TOOLS), text)
    assert [part.kind for part in parts] == ["call", "arguments", "content"]
    assert sum(part.text.count("[") for part in parts) == 5000


@pytest.mark.parametrize(("depth", "reads"), [(199, True), (200, False)])
def test_arguments_may_be_nested_as_deep_as_the_limit_and_no_deeper(depth: int, reads: bool) -> None:
    """The object of the arguments is one level itself."""
    text = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    kinds = [part.kind for part in tell(reader_of(STYLES["hermes"], TOOLS), text)]
    assert kinds == (["call", "arguments"] if reads else ["call", "arguments", "content"])


@pytest.mark.parametrize(
    "value",
    ["{[]: 1}", "{1, 2}", "b'x'", "{(1, 2): 3}", "1+" * 4000 + "1", "-" * 16_000 + "1", "'\\ud800'", "nothing"],
    ids=["unhashable", "set", "bytes", "tuple as key", "deep sum", "too many signs", "lone surrogate", "name"],
)
def test_python_whose_arguments_are_not_json_is_content(value: str) -> None:
    text = f"```tool_code\nget_weather(city={value})\n```"
    assert tell(reader_of(STYLES["gemma"], TOOLS), text) == [TextPart("content", text)]
    assert python_calls("now" + ".a" * 5000 + "()", TOOLS) is None


def test_arguments_in_a_string_that_are_nested_without_end_are_content() -> None:
    text = json.dumps({"name": "now", "parameters": "[" * 100_000})
    assert tell(reader_of(STYLES["llama3_json"], TOOLS), text) == [TextPart("content", text)]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now", "name": "get_weather", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}, "parameters": {}, "name": "now"}</tool_call>',
        '<tool_call>{"arguments": "{}", "arguments": "{}", "name": "now"}</tool_call>',
    ],
)
def test_a_call_with_two_names_or_two_sets_of_arguments_is_content(text: str) -> None:
    assert tell(reader_of(STYLES["hermes"], TOOLS), text) == [TextPart("content", text)]


THOUGHTS: list[tuple[bool, str, Parts]] = [
    (False, "<think>\nhm\n</think>\n\nYes.", [("reasoning", "hm"), (C, "Yes.")]),
    (True, "hm\n</think>\n\nYes.", [("reasoning", "hm"), (C, "Yes.")]),
    (True, "<think>hm", [("reasoning", "hm")]),
    (True, "<thi", [("reasoning", "<thi")]),
    (True, "", []),
    (False, "<thi", [(C, "<thi")]),
    (False, "Yes <think>", [(C, "Yes <think>")]),
    (False, "<think></think>Yes", [(C, "Yes")]),
    (False, "  ", [(C, "  ")]),
]


@pytest.mark.parametrize(("inside", "text", "want"), THOUGHTS)
def test_thoughts_come_out_without_their_marks(inside: bool, text: str, want: Parts) -> None:
    assert [(part.kind, part.text) for part in tell(Thinking(inside=inside), text)] == want


@pytest.mark.parametrize(("inside", "text", "want"), [(True, "a b</think>c", 5), (False, "<think>a</think>c", 4)])
def test_tokens_of_thoughts_are_counted_with_their_marks(inside: bool, text: str, want: int) -> None:
    tokens = ["<", "think>"] if text.startswith("<") else ["a", " b"]
    tokens = [*tokens, "a</", "think>", "c", "d"] if text.startswith("<") else [*tokens, "</", "thi", "nk>", "c"]
    once, apart = ReasoningCounter(inside=inside), ReasoningCounter(inside=inside)
    once.feed(tokens)
    for token in tokens:
        apart.feed([token])
    assert once.count == apart.count == want


def test_no_thoughts_no_tokens() -> None:
    thoughts = ReasoningCounter(inside=False)
    thoughts.feed(["<", "b>", "x"])
    assert thoughts.count == 0


def test_a_prompt_shows_whether_the_answer_begins_with_thoughts() -> None:
    assert thoughts_ahead("qwen3", "<|assistant|><think>\n") == "open"
    assert thoughts_ahead("qwen3", "<|assistant|>") == "possible"
    assert thoughts_ahead("deepseek_r1", "<|assistant|><think>\n\n</think>\n\n") == "none"
    assert thoughts_ahead("deepseek_r1", "what does <think> mean? <|assistant|>") == "open"
    assert thoughts_ahead("none", "<think>") == "none"
    assert thoughts_ahead("qwen3", "x", begun="<think>I was") == "open"
    assert thoughts_ahead("qwen3", "x", begun="<think>a</think>b") == "none"


@pytest.mark.parametrize(
    ("begun", "thinks"),
    [
        ("<think>a</think>b<think>c", True),
        ("<think>a</think>b<think>c</think>d", False),
        ("a</think>b", False),
        ("plain", False),
    ],
)
def test_a_continued_answer_thinks_on_if_the_last_mark_in_it_opens_thoughts(begun: str, thinks: bool) -> None:
    for parser in ("qwen3", "deepseek_r1"):
        assert (thoughts_ahead(parser, "x", begun=begun) == "open") is thinks


def test_a_template_shows_its_style() -> None:
    signs = {
        "hermes": "x<tool_call>",
        "mistral": "[TOOL_CALLS]",
        "llama3_json": "<|python_tag|>",
        "gemma": "<start_of_turn>",
    }
    for name, template in signs.items():
        assert style_of(template).name == name
    assert style_of(None).name == style_of("plain").name == "hermes"
    assert parser_of("{{ x }}</think>") == "qwen3"
    assert parser_of("<｜Assistant｜><think>{{ x }}</think>") == "deepseek_r1"
    assert parser_of("<｜Assistant｜>{{ x }}</think>") == "deepseek_v3"
    assert parser_of("{% if enable_thinking %}</think>") == "qwen3"
    assert parser_of("x") == parser_of(None) == "none"


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_a_template_without_tools_gets_them_as_text(style: Style) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3 pm"},
        {"role": "tool", "content": "4 pm"},
    ]
    shown = describe_tools(history, [tool], style)
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert (
        shown[0]["content"].startswith("Be kind.\n\nYou can call functions.") and '"name": "now"' in shown[0]["content"]
    )
    assert [part.kind for part in tell(answer_reader(style.name, TOOLS), shown[2]["content"])] == ["call", "arguments"]
    assert "3 pm" in shown[3]["content"] and "4 pm" in shown[3]["content"]


@pytest.mark.parametrize("role", ["system", "developer", "user", None])
def test_tools_are_described_in_the_system_or_developer_message_that_is_there_first(role: str | None) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    history = [] if role is None else [{"role": role, "content": "Be kind."}]
    shown = describe_tools(history, [tool], STYLES["hermes"])
    assert [message["role"] for message in shown] == {
        "user": ["system", "user"],
        None: ["system"],
    }.get(role, [role])
    assert shown[0]["content"].startswith("You can" if role in ("user", None) else "Be kind.\n\nYou can")
