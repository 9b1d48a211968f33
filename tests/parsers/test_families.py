"""Every family: what its template renders is read as it was meant, in any split, in linear time, and is found again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from jinja2.sandbox import SandboxedEnvironment

from quire.parsers.parts import Splitter, TextPart, joined
from quire.parsers.reasoning import (
    THOUGHTS,
    AnswerSplitter,
    ReasoningCounter,
    parser_of,
    thoughts_ahead,
)
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.styles import STYLES, Nested, TaggedStyle, sign_of
from tests.parsers.families import CALLS, TEMPLATES, TOOLS


def rendered(name: str, calls: Sequence[tuple[str, dict[str, Any]]] = CALLS) -> str:
    environment = SandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["python"] = repr
    shown = [
        {"id": f"functions.{tool}:{i}", "function": {"name": tool, "arguments": arguments}}
        for i, (tool, arguments) in enumerate(calls)
    ]
    return environment.from_string(TEMPLATES[name]).render(calls=shown)


def fed(splitter: Splitter, text: str, cuts: Sequence[int] = ()) -> list[TextPart]:
    parts: list[TextPart] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += splitter.feed(text[begin:end])
    return joined([*parts, *splitter.flush()])


def calls_in(parts: Sequence[TextPart]) -> list[tuple[str, Any]]:
    arguments = {part.call: part.text for part in parts if part.kind == "arguments"}
    return [(part.text, json.loads(arguments[part.call])) for part in parts if part.kind == "call"]


VLLM = """
deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 functiongemma gemma4 gigachat3 glm45 glm47 granite
granite-20b-fc granite4 hermes hunyuan_a13b internlm jamba kimi_k2 lfm2 llama3_json llama4_json llama4_pythonic longcat
mimo minimax minimax_m2 mistral olmo3 openai phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5
xlam ernie45 cohere_command3 cohere_command4 apertus minimax_m3 hy_v3 kimi_k3
minicpm5 poolside_v1 solar_open2 deepseek_v41 dots hy_v4 inkling k2_horizon ling3 muse musespark1x muse_glimmer plamo3
qwen3_json step5"""
VLLM_REASONING = """
deepseek_r1 deepseek_v3 deepseek_v4 gemma4 glm45 glm47 granite kimi_k2 mimo minimax_m2 mistral
nemotron_v3 olmo3 openai_gptoss qwen3 seed_oss step3 step3p5 ernie45 cohere_command3 cohere_command4 apertus
minimax_m3 holo2 hunyuan_a13b hy_v3 kimi_k3 minimax_m2_append_think poolside_v1 solar_open2
deepseek_v41 granite_thinking_parser hy_v4 inkling k2_horizon ling3 minicpmv muse musespark1x muse_glimmer plamo3
step5"""
"""Keys of vLLM's registries of parsers, as those who come from there spell them; all of 0.33's but `hf` and `beam`,
which read a checkpoint's own response template."""

OWN = "gemma nemotron_json cohere_command_r functionary_v3_1 functionary_v3_2 solar_open"
OWN_REASONING = "apriel functionary_v3_2 solar_open"
"""Names that it does not have."""


def test_parsers_have_the_names_of_vllm() -> None:
    assert set(STYLES) == {*OWN.split(), *VLLM.split()}
    assert set(THOUGHTS) == {*OWN_REASONING.split(), *VLLM_REASONING.split()}


def test_every_parser_has_a_template() -> None:
    assert set(TEMPLATES) == set(STYLES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_of_a_family_renders_is_read_as_it_was_meant(name: str) -> None:
    style = STYLES[name]
    calls = list(CALLS[: style.most])
    text = rendered(name, calls)
    if isinstance(style, TaggedStyle) and isinstance(style.form, Nested):
        # This format has no null in objects: such elements are left out.
        calls = [(tool, {key: value for key, value in given.items() if value is not None}) for tool, given in calls]
    parts = fed(reader_of(style, TOOLS), text)
    assert calls_in(parts) == calls, text
    assert [part for part in parts if part.kind == "content"] == []
    if not style.bare or isinstance(style, TaggedStyle):
        parts = fed(reader_of(style, TOOLS), "Let me look: " + text)
        assert calls_in(parts) == calls and parts[0] == TextPart("content", "Let me look:")


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_at_every_place_the_text_may_be_cut(name: str, step: int) -> None:
    """In CI all at once, and at every third alone."""
    text = "So: " * (not STYLES[name].bare) + rendered(name)
    whole = fed(reader_of(STYLES[name], TOOLS), text)
    assert fed(reader_of(STYLES[name], TOOLS), text, range(1, len(text))) == whole
    for at in range(0, len(text), step):
        assert fed(reader_of(STYLES[name], TOOLS), text, [at]) == whole, text[:at]


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if isinstance(style, TaggedStyle)])
def test_a_call_that_is_cut_off_is_never_completed(name: str) -> None:
    text = rendered(name, CALLS[:1])
    for at in range(len(text)):
        arguments = [part.text for part in fed(reader_of(STYLES[name], TOOLS), text[:at]) if part.kind == "arguments"]
        try:
            read = [json.loads(each) for each in arguments]
        except ValueError:
            continue
        assert read in ([], [{}], [CALLS[0][1]]), text[:at]


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_of_a_call_that_is_cut_off_are_not_content(name: str) -> None:
    text, begun = rendered(name, CALLS[:1]), False
    for at in range(len(text)):
        kinds = {part.kind for part in fed(reader_of(STYLES[name], TOOLS), text[:at])}
        begun = begun or "call" in kinds
        assert not (begun and "content" in kinds), text[:at]
    assert begun or STYLES[name].bare


@cache
def pieces(name: str) -> list[str]:
    """Marks of a style, and calls in it. Not made by importing, which every worker does."""
    style = STYLES[name]
    return [
        *(mark for mark in (style.before, style.between, style.finish, style.after, style.head("now")) if mark),
        *(style.marks if not isinstance(style, TaggedStyle) else (style.begin, *style.opens, *style.closes)),
        rendered(name),
        rendered(name, CALLS[1:2]),
    ]


PLAIN = ["{", "}", "[", "]", '"', ":", ",", "\n", "  ", "city", "7", "null", "<", ">", "</", "é€😀", "Yes.", "\\", "'"]
MARKS = [
    mark
    for style in THOUGHTS.values()
    for mark in (
        *style.opens,
        *style.closes,
        style.between,
        style.answer,
        *(one for pair in style.around for one in pair),
    )
]


def splitters(name: str, thoughts: str, inside: bool) -> Splitter:
    calls = reader_of(STYLES[name], TOOLS)
    if thoughts not in THOUGHTS:
        return calls
    style = THOUGHTS[thoughts]
    return AnswerSplitter(style.splitter(inside=inside and bool(style.opens)), calls)


def split_at_random(seed: int, count: int) -> Iterator[tuple[str, str, list[int], list[TextPart], list[TextPart]]]:
    """Texts of pieces that mean something to a parser, each read whole and in pieces."""
    rng = random.Random(seed)
    names, thoughts = sorted(STYLES), ["none", *THOUGHTS]
    for i in range(count):
        name, thinks = names[i % len(names)], thoughts[i // len(names) % len(thoughts)]
        own = [*pieces(name), *(MARKS if thinks != "none" else ())]
        text = "".join(rng.choice(own if rng.random() < 0.6 else PLAIN) for _ in range(rng.randrange(1, 9)))
        cuts = sorted(rng.sample(range(len(text) + 1), rng.randrange(min(len(text), 12) + 1)))
        inside = rng.random() < 0.5
        whole = fed(splitters(name, thinks, inside), text)
        yield f"{name} {thinks} {inside}", text, cuts, whole, fed(splitters(name, thinks, inside), text, cuts)


def check_splits(seed: int, count: int) -> None:
    for about, text, cuts, whole, pieces in split_at_random(seed, count):
        assert pieces == whole, (about, text, cuts)
        begun = [part.call for part in whole if part.kind == "call"]
        assert begun == list(range(len(begun)))
        "".join(part.text for part in whole).encode()


def test_any_split_gives_what_the_whole_text_gives() -> None:
    check_splits(1, 4_000)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_splits_give_what_the_whole_text_gives(seed: int) -> None:
    check_splits(100 + seed, 10_000)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("filling", ["x", " ", "[1, ", "\n", "{"])
def test_reading_takes_steps_in_proportion_to_the_text(name: str, filling: str) -> None:
    """What a reader holds back does not grow with the text, but for values whose type is known at their end."""
    style = STYLES[name]
    reader = reader_of(style, TOOLS)
    text = ("" if style.bare else "a") + filling * 1_000
    for c in text:
        reader.feed(c)
    tape = getattr(reader, "_tape", None)
    held = len(tape._text) - tape._at if tape is not None else len(reader._text)  # type: ignore[attr-defined]
    assert held < 500 or filling == "[1, "


SIGNS: list[tuple[str, str, str]] = [
    ("'<tool_calls{}>'.format(':opensource') <tool_sep{}> <think{}>", "hy_v3", "hy_v3"),
    ("<|content_text|><|content_thinking|><|content_invoke_tool_json|>", "inkling", "inkling"),
    ("<dots_function_call>", "dots", "none"),
    ("<ifm|tool_calls><ifm|think>", "k2_horizon", "k2_horizon"),
    ("<|plamo:begin_tool_requests:plamo|><|plamo:begin_think:plamo|>", "plamo3", "plamo3"),
    ("<｜DSML｜ calls></think>", "deepseek_v41", "deepseek_v4"),
    ("<|open|>think<|sep|> argument <|close|>", "kimi_k3", "kimi_k3"),
    ('<function name="f"><param name="k">v</param></function></think>', "minicpm5", "qwen3"),
    ('<function name="f"><param name="k">v</param></function></think> <tool_sep>', "minicpm5", "qwen3"),
    ("<|tool_call:start|><|tool_arg:start|><|think:start|>", "solar_open2", "solar_open2"),
    ("<|begin|>assistant<|think|><|content|><|tool_call:args|>", "solar_open", "solar_open"),
    ('<|start|>assistant to=self<|message|><atem:invoke name="f">', "muse_glimmer", "muse_glimmer"),
    ("<|start_header_id|><function=name>{}</function><|eom_id|>", "functionary_v3_1", "none"),
    ("<|start_header_id|>>>>all", "functionary_v3_2", "functionary_v3_2"),
    ("<TOOLCALL>[]</TOOLCALL><think></think>", "nemotron_json", "qwen3"),
    ("<|CHATBOT_TOKEN|>Action: tool_name", "cohere_command_r", "none"),
    ("<tool_calls>[BEGIN FINAL RESPONSE]", "jamba", "apriel"),
    ("<|assistant_name|></think><arg_key>laguna", "glm47", "glm45"),
    ("{{ tools }}<tool_call>{{ enable_thinking }}</think>", "hermes", "qwen3"),
    ("<tool_call>\n<function=name>\n<parameter=x>", "qwen3_coder", "none"),
    ("<seed:tool_call><function=a><parameter=b></seed:think>", "seed_oss", "seed_oss"),
    ("<minimax:tool_call><invoke name=x>...<think>\n</think>", "minimax_m2", "minimax_m2"),
    ("<tool_call>a\n<arg_key>k</arg_key>\n<arg_value></think>", "glm45", "glm45"),
    ("<tool_call>a<arg_key>k</arg_key><arg_value>enable_thinking</think>", "glm47", "glm45"),
    ("<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2"),
    ("<｜Assistant｜><think><｜tool▁calls▁begin｜>```json\n</think>", "deepseek_v3", "deepseek_r1"),
    ("<｜Assistant｜>{{ thinking }}<｜tool▁calls▁begin｜></think>", "deepseek_v31", "deepseek_v3"),
    ("<|start|>assistant<|channel|>analysis<|message|> to=functions.x<|channel|>commentary", "openai", "openai_gptoss"),
    ("<|turn>model<|channel>thought<channel|><|tool_call>call:", "gemma4", "gemma4"),
    ("<start_function_call>call:", "functiongemma", "none"),
    ("<|header_start|><|python_start|>[func_name1(x)]<|python_end|>", "llama4_pythonic", "none"),
    ("<|header_start|>{'parameters'}", "llama4_json", "none"),
    ("<|start_header_id|>[func_name1(params_name1=1)]", "pythonic", "none"),
    ("<|start_header_id|><|python_tag|>", "llama3_json", "none"),
    ("<function_calls>", "olmo3", "none"),
    ("<|start_of_role|>assistant<tool_call>", "granite4", "none"),
    ("<|start_of_role|>assistant<|tool_call|> Here is my thought process:", "granite", "granite"),
    ("<|tool|>x<|/tool|>", "phi4_mini_json", "none"),
    ("<tool_calls>", "jamba", "none"),
    ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("<start_of_turn>", "gemma", "none"),
    ("<｜DSML｜function_calls><｜DSML｜invoke>{{ thinking }}<｜Assistant｜></think>", "deepseek_v32", "deepseek_v3"),
    ("<｜DSML｜tool_calls>", "deepseek_v4", "none"),
    ('<｜tool_calls_begin｜><steptml:invoke name="></think>', "step3", "step3"),
    ("<longcat_tool_call>", "longcat", "none"),
    ("<|tool_call_start|>[]<|tool_call_end|>", "lfm2", "none"),
    ("<|action_start|><|plugin|>", "internlm", "none"),
    ("function call<|role_sep|>", "gigachat3", "none"),
    ("<function_call> {", "granite-20b-fc", "none"),
    ("<|extra_0|><tool_calls>", "hunyuan_a13b", "none"),
    ("<beginning_of_sentence><tool_calls>", "minimax", "none"),
    ("]<]minimax[>[ <tool_call> <mm:think> </mm:think>", "minimax_m3", "minimax_m3"),
    ("<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>", "cohere_command3", "cohere_command3"),
    ("<|START_THINKING|><|START_ACTION|><|START_TEXT|>", "cohere_command4", "cohere_command4"),
    ("<|inner_prefix|><|tools_prefix|>", "apertus", "apertus"),
    ("<think>\n</think><response><tool_call>", "ernie45", "ernie45"),
    ("<|start_of_role|><|tool_call|><think></think><response></response>", "granite", "granite"),
    ("<|im_start|><tool_call></think>", "hermes", "qwen3"),
]


@pytest.mark.parametrize(("template", "tools", "thoughts"), SIGNS)
def test_a_template_shows_its_parsers(template: str, tools: str, thoughts: str) -> None:
    found = sign_of(template)
    assert found is not None and (found.name, parser_of(template)) == (tools, thoughts)


def test_a_template_without_a_format_shows_none() -> None:
    assert sign_of("{% for m in messages %}{{ m.content }}{% endfor %}") is sign_of(None) is None


HARMONY = (
    "<|channel|>analysis<|message|>Let me <see>.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
    "<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>" + '{"city": "Ulm"}<|call|>'
)


def test_messages_in_channels_become_thoughts_content_and_calls() -> None:
    for cuts in ([], range(1, len(HARMONY)), range(7, len(HARMONY), 7)):
        parts = fed(splitters("openai", "openai_gptoss", False), HARMONY, cuts)
        assert parts == [
            TextPart("reasoning", "Let me <see>."),
            TextPart("content", "One moment."),
            TextPart("call", "weather", 0),
            TextPart("arguments", '{"city": "Ulm"}', 0),
        ]
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert fed(THOUGHTS["openai_gptoss"].splitter(inside=False), answer) == [
        TextPart("reasoning", "Hm."),
        TextPart("content", "Yes."),
    ]


WRITTEN: list[tuple[str, bool, str, str]] = [
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm."),
    ("granite", False, "Here's my thought process:\nHm.\nHere is my response:\nYes.", "Hm."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm."),
    ("minimax_m2", True, "Hm.\n</think>\n\nYes.", "Hm."),
    ("seed_oss", False, "<seed:think>\nHm.</seed:think>Yes.", "Hm."),
    ("granite", False, "<think>Hm.</think><response>Yes.</response>", "Hm."),
    ("ernie45", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm."),
    ("cohere_command3", False, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm."),
    ("cohere_command4", True, "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm."),
    ("apertus", False, "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm."),
    ("minimax_m3", False, "<mm:think>Hm.</mm:think>Yes.", "Hm."),
    ("hunyuan_a13b", False, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm."),
    ("hy_v3", True, "Hm.</think:opensource>Yes.", "Hm."),
    ("solar_open2", True, "Hm.<|think:end|>Yes.", "Hm."),
    ("hy_v4", True, "Hm.</think:opensource>Yes.", "Hm."),
    ("k2_horizon", False, "<ifm|think_fast>Hm.</ifm|think_fast>Yes.", "Hm."),
    ("plamo3", True, "Hm.<|plamo:end_think:plamo|>Yes.", "Hm."),
    ("apriel", True, "Hm.\n[BEGIN FINAL RESPONSE]\nYes.", "Hm."),
    (
        "kimi_k3",
        True,
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Hm.",
    ),
]


@pytest.mark.parametrize(("name", "inside", "text", "thought"), WRITTEN)
def test_thoughts_of_each_family_are_found(name: str, inside: bool, text: str, thought: str) -> None:
    parts = fed(THOUGHTS[name].splitter(inside=inside), text)
    assert parts == [TextPart("reasoning", thought), TextPart("content", "Yes.")]
    counter = ReasoningCounter(inside=inside, style=THOUGHTS[name])
    counter.feed(list(text))
    thoughts = text[: text.index("Yes.")]
    for before, _ in THOUGHTS[name].around:
        thoughts = thoughts.removesuffix("\n").removesuffix(before).rstrip("\n")
    assert counter.over and len(thoughts) - 3 <= counter.count <= len(thoughts)


CHANNELS: list[tuple[str, str, list[TextPart]]] = [
    (
        "inkling",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|><|message_model|>"
        'now<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|><|message_model|>'
        '<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|><|content_model_end_sampling|>',
        [
            TextPart("reasoning", "Hm."),
            TextPart("content", "Yes."),
            TextPart("call", "now"),
            TextPart("arguments", "{}"),
            TextPart("call", "now", 1),
            TextPart("arguments", "{}", 1),
        ],
    ),
    ("inkling", "Yes.<|end_message|>", [TextPart("content", "Yes.")]),
    ("inkling", "Yes. " * 200 + "<|end_message|><|message_model|>No.", [TextPart("content", "Yes. " * 200 + "No.")]),
    (
        "muse",
        "<|message|>Hm.<|eom|><|start|>assistant to=developer<|message|> So.<|eom|><|start|>assistant to=commentary"
        '<|message|>Yes.<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>",
        [
            TextPart("reasoning", "Hm. So."),
            TextPart("content", "Yes."),
            TextPart("call", "now"),
            TextPart("arguments", "{}"),
        ],
    ),
    (
        "muse_glimmer",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eom|><|start|>assistant to=now"
        "<|message|>"
        '<atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
        [
            TextPart("reasoning", "Hm."),
            TextPart("content", "Yes."),
            TextPart("call", "now"),
            TextPart("arguments", "{}"),
        ],
    ),
    (
        "solar_open",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>"
        "a1b2<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        [
            TextPart("reasoning", "Hm."),
            TextPart("content", "Yes."),
            TextPart("call", "now"),
            TextPart("arguments", "{}"),
        ],
    ),
    (
        "functionary_v3_2",
        "all\nYes:\n>>> print(1)\n>>>now\n{}>>>weather\n" + '{"note": ">>> x"}',
        [
            TextPart("content", "Yes:\n>>> print(1)"),
            TextPart("call", "now"),
            TextPart("arguments", "{}"),
            TextPart("call", "weather", 1),
            TextPart("arguments", '{"note": ">>> x"}', 1),
        ],
    ),
]


@pytest.mark.parametrize(("name", "text", "parts"), CHANNELS)
def test_messages_of_an_answer_are_told_by_their_headers(name: Any, text: str, parts: list[TextPart]) -> None:
    for cuts in ([], range(1, len(text)), range(7, len(text), 7)):
        assert fed(splitters(name, name, False), text, cuts) == parts


def test_thoughts_may_be_shown_with_their_marks() -> None:
    """vLLM's minimax_m2_append_think."""
    style = THOUGHTS["minimax_m2_append_think"]
    assert fed(style.splitter(inside=True), "Hm.</think>Yes.") == [TextPart("content", "<think>Hm.</think>Yes.")]
    counter = ReasoningCounter(inside=True, style=style)
    counter.feed(["Hm.", "</think>", "Yes."])
    assert counter.over and counter.count == 2


def test_an_answer_within_marks_that_the_prompt_has_opened_ends_with_its_mark() -> None:
    """Kimi K3's prompts do so where it does not think."""
    prompt = "<|open|>response<|sep|>"
    assert thoughts_ahead("kimi_k3", prompt) == "none"
    text = "Yes.<|close|>response<|sep|><|close|>message<|sep|>"
    for cuts in ([], range(1, len(text))):
        assert fed(THOUGHTS["kimi_k3"].splitter(inside=False), text, cuts) == [TextPart("content", "Yes.")]


def test_marks_around_an_answer_belong_to_neither() -> None:
    """They are marks at the beginning of an answer only; what follows the answer may be a call."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"<think>Hm.</think>\n<response>\nA <response> is:\n\n x\n</response>\n{call}"
    for cuts in ([], range(1, len(text)), range(5, len(text), 5)):
        assert fed(splitters("ernie45", "ernie45", False), text, cuts) == [
            TextPart("reasoning", "Hm."),
            TextPart("content", "A <response> is:\n\n x"),
            TextPart("call", "now", 0),
            TextPart("arguments", "{}", 0),
        ]
    cut_off = "<|START_RESPONSE|>Yes, \n <|END_RES"
    assert fed(THOUGHTS["cohere_command3"].splitter(inside=False), cut_off) == [
        TextPart("content", "Yes, \n <|END_RES")
    ]


@pytest.mark.parametrize("name", [name for name, style in THOUGHTS.items() if not (style.channels or style.shown)])
def test_an_answer_may_begin_with_the_end_of_thoughts_that_are_empty(name: str) -> None:
    style = THOUGHTS[name]
    assert fed(style.splitter(inside=False), style.closes[0] + "\n\nYes.") == [TextPart("content", "Yes.")]


@pytest.mark.parametrize("cuts", [[], range(1, 60), [3, 20]])
def test_a_message_to_a_tool_may_begin_with_its_recipient(cuts: Sequence[int]) -> None:
    """gpt-oss's template ends prompts with `<|start|>assistant`, and writes the recipient of a call there."""
    text = " to=functions.weather<|channel|>commentary json<|message|>" + '{"city": "Ulm"}<|call|>'
    assert fed(splitters("openai", "openai_gptoss", False), text, cuts) == [
        TextPart("call", "weather", 0),
        TextPart("arguments", '{"city": "Ulm"}', 0),
    ]
    said = " to=functions are called."
    assert fed(THOUGHTS["openai_gptoss"].splitter(inside=False), said) == [TextPart("content", said)]


def test_python_may_have_line_breaks_in_its_strings() -> None:
    """LFM2.5's template writes them so."""
    text = "<|tool_call_start|>[weather(city='a\nb \\'c\\'', days=2)]<|tool_call_end|>"
    assert calls_in(fed(reader_of(STYLES["lfm2"], TOOLS), text)) == [("weather", {"city": "a\nb 'c'", "days": 2})]


@pytest.mark.parametrize("name", ["seed_oss", "qwen3_coder"])
def test_lists_may_be_written_as_python_prints_them(name: str) -> None:
    """The templates of Seed-OSS and Qwen 3 Coder write them so."""
    form = STYLES[name].form
    text = STYLES[name].before + STYLES[name].head("weather") + form.open + "places>[{'name': 'x', 'at': None}]"
    text += form.close + STYLES[name].finish
    assert calls_in(fed(reader_of(STYLES[name], TOOLS), text)) == [("weather", {"places": [{"name": "x", "at": None}]})]


def test_calls_end_the_thoughts_of_kimi() -> None:
    text = "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    parts = fed(splitters("kimi_k2", "kimi_k2", False), text)
    assert [(part.kind, part.text) for part in parts] == [("reasoning", "Hm."), ("call", "now"), ("arguments", "{}")]
