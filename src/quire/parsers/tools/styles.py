"""How each family of models writes tool calls, and prompts that ask a model without its own format to do so.

The names are those of vLLM's registry, but for `gemma`, which it does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from quire.types import UNLIMITED

ToolParser = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "gemma",
    "llama4_json",
    "pythonic",
    "llama4_pythonic",
    "olmo3",
    "granite",
    "granite4",
    "phi4_mini_json",
    "jamba",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "minimax_m2",
    "glm45",
    "glm47",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "openai",
    "gemma4",
    "functiongemma",
    "longcat",
    "lfm2",
    "mimo",
    "step3",
    "step3p5",
    "hunyuan_a13b",
    "minimax",
    "internlm",
    "granite-20b-fc",
    "gigachat3",
    "xlam",
    "ernie45",
    "cohere_command3",
    "cohere_command4",
    "apertus",
    "minimax_m3",
]

Form = Literal["any", "known", "python"]
"""What follows a mark: a call in JSON; one only if it names a known tool; or calls in Python, up to the end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """What the formats of all families have in common.

    models: those that write so, for the documentation. bare: at the beginning of an answer, calls may stand without a
    mark. special: the marks are special tokens, which decoding omits by default. call_id: of a call, for templates that
    check or show it: `{name}`, `{index}` (its number in the conversation) and `{random}` stand in it. id_length:
    characters of `{random}`. most: calls in one answer. before, between, after: the text around and between the calls
    of an answer. start: what a call begins with, up to its arguments: `{name}` stands in it, and `{index}` for a
    number. finish: what follows the arguments.
    """

    name: ToolParser
    models: str
    bare: bool = False
    special: bool = False
    call_id: str = "call_{random}"
    id_length: int = 24
    most: int = UNLIMITED
    before: str = ""
    between: str = ""
    after: str = ""
    start: str
    finish: str

    def head(self, name: str, index: int = 0) -> str:
        """The text of a call up to its arguments; `finish` follows them."""
        return self.start.replace("{index}", str(index)).replace("{name}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle(CallStyle):
    """Calls as JSON objects, or in Python.

    marks: texts that a call begins with, and the form of what follows. end: text that ends calls, or empty. named: a
    name may stand between mark and arguments. name_key: the key of the name; empty where a call is an object whose only
    key is the name, and whose value are the arguments.
    """

    marks: Mapping[str, Form]
    end: str = ""
    named: bool = False
    name_key: str = "name"
    start: str = '{"name": "{name}", "arguments": '
    finish: str = "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments as one element for each parameter: open, key, key_end, gap, value_open, value, close, space.

    text_open: what stands for `value_open` before a string, in formats that mark strings. lines: a line break after the
    key's end and one before `close` belong to the format. Strings are written as they are, all other values as JSON.
    """

    open: str
    key_end: str
    gap: str = ""
    value_open: str = ""
    text_open: str = ""
    close: str
    space: str = "\n"
    lines: bool = False

    def opening(self, *, text: bool) -> str:
        """What a value begins with. text: it is a string."""
        return (text and self.text_open) or self.value_open


@dataclass(frozen=True, slots=True)
class Notation:
    """Gemma's notation: JSON with bare keys, and with strings between `quote`."""

    quote: str


@dataclass(frozen=True, slots=True)
class Nested:
    """Arguments as elements within elements, each tag behind `mark`: a property is `<key>value</key>`, an entry of a
    list `<item>value</item>`. Strings are written as they are, all other values as JSON."""

    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedStyle(CallStyle):
    """Calls between tags.

    begin: what a call begins with; what follows, up to one of `head_ends`, matches `named`. form: of the arguments;
    None for JSON. opens: marks before the first call. closes: marks behind calls. None of the marks begins with
    another.
    """

    begin: str
    head_ends: tuple[str, ...]
    named: str = r"\s*(?P<name>[\w.:/-]{1,256})\s*"
    form: Parameters | Notation | Nested | None = None
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()


Style = ToolStyle | TaggedStyle

_PARAMETERS_KEY = '{"name": "{name}", "parameters": '

HERMES = ToolStyle(
    name="hermes",
    models="Hermes, Qwen 2.5 and 3",
    marks={"<tool_call>": "any"},
    end="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
_LLAMA3 = ToolStyle(
    name="llama3_json",
    models="Llama 3.1 to 3.3",
    marks={"<|python_tag|>": "any"},
    special=True,
    bare=True,
    start=_PARAMETERS_KEY,
    between="; ",
)

_MISTRAL = ToolStyle(
    name="mistral",
    models="Mistral, Ministral, Magistral, Devstral",
    marks={"[TOOL_CALLS]": "any"},
    special=True,
    named=True,
    bare=True,
    call_id="{random}",
    id_length=9,
    before="[",
    between=", ",
    after="]",
)

_GEMMA = ToolStyle(
    name="gemma",
    models="Gemma 2 and 3",
    marks={"```tool_code": "python", "```tool_call": "any", "```json": "known"},
    end="```",
    bare=True,
    start=_PARAMETERS_KEY,
    before="[",
    between=", ",
    after="]",
)

_PYTHONIC = ToolStyle(
    name="pythonic",
    models="Llama 3.2 with a pythonic template, ToolACE",
    marks={},
    bare=True,
    start=_PARAMETERS_KEY,
    before="[",
    between=", ",
    after="]",
)

_GRANITE = ToolStyle(
    name="granite",
    models="Granite 3",
    marks={"<|tool_call|>": "any", "<tool_call>": "any"},
    special=True,
    bare=True,
    before="<|tool_call|>[",
    between=", ",
    after="]",
)

_JAMBA = replace(
    _GRANITE,
    name="jamba",
    models="Jamba 1.5 and later",
    marks={"<tool_calls>": "any"},
    end="</tool_calls>",
    special=False,
    bare=False,
    before="<tool_calls>[",
    after="]</tool_calls>",
)

_QWEN3_CODER = TaggedStyle(
    name="qwen3_coder",
    models="Qwen 3 Coder, Qwen 3.5",
    begin="<function=",
    head_ends=(">",),
    form=Parameters(open="<parameter=", key_end=">", close="</parameter>", lines=True),
    opens=("<tool_call>",),
    closes=("</function>", "</tool_call>"),
    before="<tool_call>\n",
    start="<function={name}>\n",
    finish="</function>",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)

_GLM45 = TaggedStyle(
    name="glm45",
    models="GLM 4.5 and 4.6",
    begin="<tool_call>",
    head_ends=("\n", "<arg_key>", "</tool_call>"),
    form=Parameters(open="<arg_key>", key_end="</arg_key>", gap="\n", value_open="<arg_value>", close="</arg_value>"),
    closes=("</tool_call>",),
    start="<tool_call>{name}\n",
    finish="</tool_call>",
    between="\n",
)

_DEEPSEEK_V31 = TaggedStyle(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    special=True,
    begin="<｜tool▁call▁begin｜>",
    head_ends=("<｜tool▁sep｜>",),
    opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    before="<｜tool▁calls▁begin｜>",
    start="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    finish="<｜tool▁call▁end｜>",
    after="<｜tool▁calls▁end｜>",
)

_DEEPSEEK_V32 = TaggedStyle(
    name="deepseek_v32",
    models="DeepSeek V3.2",
    begin='<｜DSML｜invoke name="',
    head_ends=('">',),
    form=Parameters(
        open='<｜DSML｜parameter name="',
        key_end='"',
        gap=" ",
        value_open='string="false">',
        text_open='string="true">',
        close="</｜DSML｜parameter>",
    ),
    opens=("<｜DSML｜function_calls>",),
    closes=("</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
    before="<｜DSML｜function_calls>\n",
    start='<｜DSML｜invoke name="{name}">\n',
    finish="</｜DSML｜invoke>\n",
    after="</｜DSML｜function_calls>",
)

_GEMMA4 = TaggedStyle(
    name="gemma4",
    models="Gemma 4",
    special=True,
    begin="<|tool_call>call:",
    head_ends=("{",),
    form=Notation('<|"|>'),
    closes=("<tool_call|>",),
    start="<|tool_call>call:{name}",
    finish="<tool_call|>",
)

_COHERE = ToolStyle(
    name="cohere_command3",
    models="Command R7B, Command A",
    special=True,
    marks={"<|START_ACTION|>": "any"},
    end="<|END_ACTION|>",
    name_key="tool_name",
    before="<|START_ACTION|>[\n    ",
    start='{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": ',
    between=",\n    ",
    after="\n]<|END_ACTION|>",
)

_APERTUS = ToolStyle(
    name="apertus",
    models="Apertus",
    special=True,
    marks={"<|tools_prefix|>": "any"},
    end="<|tools_suffix|>",
    name_key="",
    before="<|tools_prefix|>[",
    start='{"{name}": ',
    between=", ",
    after="]<|tools_suffix|>",
)

_M3 = "]<]minimax[>["
_MINIMAX_M3 = TaggedStyle(
    name="minimax_m3",
    models="MiniMax M3",
    special=True,
    begin=f'{_M3}<invoke name="',
    head_ends=('">',),
    form=Nested(_M3),
    opens=(f"{_M3}<tool_call>",),
    closes=(f"{_M3}</invoke>", f"{_M3}</tool_call>"),
    before=f"{_M3}<tool_call>\n",
    start=f'{_M3}<invoke name="{{name}}">',
    finish=f"{_M3}</invoke>\n",
    after=f"{_M3}</tool_call>",
)

_ALL: Sequence[Style] = (
    HERMES,
    replace(HERMES, name="granite4", models="Granite 4"),
    replace(HERMES, name="ernie45", models="ERNIE 4.5"),
    replace(
        HERMES,
        name="longcat",
        models="LongCat Flash",
        marks={"<longcat_tool_call>": "any"},
        end="</longcat_tool_call>",
        before="<longcat_tool_call>\n",
        between="\n</longcat_tool_call>\n<longcat_tool_call>\n",
        after="\n</longcat_tool_call>",
    ),
    _QWEN3_CODER,
    replace(_QWEN3_CODER, name="qwen3_xml"),
    replace(_QWEN3_CODER, name="mimo", models="MiMo V2"),
    replace(_QWEN3_CODER, name="step3p5", models="Step 3.5"),
    TaggedStyle(
        name="step3",
        models="Step 3",
        special=True,
        begin='<steptml:invoke name="',
        head_ends=('">',),
        form=Parameters(open='<steptml:parameter name="', key_end='">', close="</steptml:parameter>", space=""),
        opens=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
        closes=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        before="<｜tool_calls_begin｜>\n",
        start='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
        finish="</steptml:invoke><｜tool_call_end｜>\n",
        after="<｜tool_calls_end｜>",
    ),
    replace(
        _QWEN3_CODER,
        name="seed_oss",
        models="Seed-OSS",
        form=Parameters(open="<parameter=", key_end=">", close="</parameter>"),
        opens=("<seed:tool_call>",),
        closes=("</function>", "</seed:tool_call>"),
        before="<seed:tool_call>\n",
        between="\n</seed:tool_call>\n<seed:tool_call>\n",
        after="\n</seed:tool_call>",
    ),
    _LLAMA3,
    replace(_LLAMA3, name="llama4_json", models="Llama 4"),
    _PYTHONIC,
    replace(
        _PYTHONIC,
        name="llama4_pythonic",
        models="Llama 4 with a pythonic template",
        marks={"<|python_start|>": "python"},
        end="<|python_end|>",
        special=True,
    ),
    replace(
        _PYTHONIC,
        name="lfm2",
        models="LFM2",
        marks={"<|tool_call_start|>": "python"},
        end="<|tool_call_end|>",
        special=True,
    ),
    replace(
        _PYTHONIC,
        name="olmo3",
        models="OLMo 3",
        marks={"<function_calls>": "python"},
        end="</function_calls>",
    ),
    _MISTRAL,
    TaggedStyle(
        name="deepseek_v3",
        models="DeepSeek V3 and R1",
        special=True,
        begin="<｜tool▁call▁begin｜>",
        head_ends=("```json",),
        named=r"function<｜tool▁sep｜>(?P<name>[\w.:/-]{1,256})\s*",
        opens=("<｜tool▁calls▁begin｜>",),
        closes=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        before="<｜tool▁calls▁begin｜>",
        start="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        finish="\n```<｜tool▁call▁end｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    _DEEPSEEK_V31,
    _DEEPSEEK_V32,
    replace(
        _DEEPSEEK_V32,
        name="deepseek_v4",
        models="DeepSeek V4",
        opens=("<｜DSML｜tool_calls>",),
        closes=("</｜DSML｜invoke>", "</｜DSML｜tool_calls>"),
        before="<｜DSML｜tool_calls>\n",
        after="</｜DSML｜tool_calls>",
    ),
    _GLM45,
    replace(
        _GLM45,
        name="glm47",
        models="GLM 4.7",
        form=replace(cast(Parameters, _GLM45.form), gap="", space=""),
        start="<tool_call>{name}",
        between="",
    ),
    TaggedStyle(
        name="kimi_k2",
        models="Kimi K2",
        special=True,
        call_id="functions.{name}:{index}",
        begin="<|tool_call_begin|>",
        head_ends=("<|tool_call_argument_begin|>",),
        named=r"\s*(?:functions\.)?(?P<name>[\w./-]{1,256})(?::\d{1,9})?\s*",
        opens=("<|tool_calls_section_begin|>",),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        before="<|tool_calls_section_begin|>",
        start="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        finish="<|tool_call_end|>",
        after="<|tool_calls_section_end|>",
    ),
    TaggedStyle(
        name="minimax_m2",
        models="MiniMax M2",
        begin='<invoke name="',
        head_ends=('">',),
        form=Parameters(open='<parameter name="', key_end='">', close="</parameter>"),
        opens=("<minimax:tool_call>",),
        closes=("</invoke>", "</minimax:tool_call>"),
        before="<minimax:tool_call>\n",
        start='<invoke name="{name}">\n',
        finish="</invoke>\n",
        after="</minimax:tool_call>",
    ),
    TaggedStyle(
        name="openai",
        models="gpt-oss",
        special=True,
        most=1,
        begin="<|channel|>commentary to=functions.",
        head_ends=("<|message|>",),
        named=r"(?P<name>[\w./-]{1,256})(?:\s*<\|constrain\|>\s*\w{1,16}|\s+\w{1,16})?\s*",
        closes=("<|call|>",),
        start="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        finish="",
    ),
    _GRANITE,
    replace(
        _GRANITE,
        name="phi4_mini_json",
        models="Phi-4-mini",
        marks={"functools": "any", "<|tool_call|>": "any"},
        end="<|/tool_call|>",
        bare=False,
        before="functools[",
    ),
    _JAMBA,
    replace(_JAMBA, name="hunyuan_a13b", models="Hunyuan A13B"),
    replace(
        _JAMBA, name="minimax", models="MiniMax M1", before="<tool_calls>\n", between="\n", after="\n</tool_calls>"
    ),
    replace(
        _GRANITE,
        name="granite-20b-fc",
        models="Granite 20B functioncalling",
        marks={"<function_call>": "any"},
        special=False,
        bare=False,
        before="<function_call> ",
        between="<function_call> ",
        after="",
    ),
    replace(_GRANITE, name="xlam", models="xLAM 2", marks={"[TOOL_CALLS]": "any"}, special=False, before="["),
    ToolStyle(
        name="gigachat3",
        models="GigaChat 3",
        special=True,
        most=1,
        marks={
            "function call<|role_sep|>": "any",
            "<|message_sep|>\n\nfunction call<|role_sep|>": "any",
            "<|function_call|>": "any",
        },
        end="<|message_sep|>",
        before="function call<|role_sep|>\n",
        between="function call<|role_sep|>\n",
    ),
    ToolStyle(
        name="internlm",
        models="InternLM 2 and 3",
        special=True,
        marks={"<|action_start|><|plugin|>": "any"},
        end="<|action_end|>",
        start=_PARAMETERS_KEY,
        before="<|action_start|><|plugin|>\n",
        between="<|action_end|>\n<|action_start|><|plugin|>\n",
        after="<|action_end|>",
    ),
    _COHERE,
    replace(_COHERE, name="cohere_command4", models="Command A+"),
    _APERTUS,
    _MINIMAX_M3,
    _GEMMA,
    _GEMMA4,
    replace(
        _GEMMA4,
        name="functiongemma",
        models="FunctionGemma",
        begin="<start_function_call>call:",
        form=Notation("<escape>"),
        closes=("<end_function_call>",),
        start="<start_function_call>call:{name}",
        finish="<end_function_call>",
    ),
)

STYLES: Mapping[ToolParser, Style] = {style.name: style for style in _ALL}


def style_of(template: str | None) -> Style:
    """The style of a chat template; Hermes where the template does not show one."""
    return sign_of(template) or HERMES


def sign_of(template: str | None) -> Style | None:
    """The style that a chat template shows, by the first of `_SIGNS` whose texts it contains."""
    found = (name for name, *texts in _SIGNS if template is not None and all(text in template for text in texts))
    return next((STYLES[name] for name in found), None)


_SIGNS: Sequence[tuple[ToolParser, *tuple[str, ...]]] = (
    ("minimax_m2", "<minimax:tool_call>"),
    ("minimax_m3", "]<]minimax[>["),
    ("cohere_command4", "<|START_ACTION|>", "<|START_TEXT|>"),
    ("cohere_command3", "<|START_ACTION|>"),
    ("apertus", "<|tools_prefix|>"),
    ("deepseek_v32", "｜DSML｜", "function_calls"),
    ("deepseek_v4", "｜DSML｜"),
    ("step3", "<steptml:invoke"),
    ("longcat", "<longcat_tool_call>"),
    ("lfm2", "<|tool_call_start|>"),
    ("lfm2", "<|tool_list_start|>"),
    ("internlm", "<|action_start|>"),
    ("gigachat3", "<|role_sep|>", "function call"),
    ("gigachat3", "<|function_call|>"),
    ("granite-20b-fc", "<function_call>"),
    ("hunyuan_a13b", "<tool_calls>", "<|extra_0|>"),
    ("minimax", "<tool_calls>", "<beginning_of_sentence>"),
    ("seed_oss", "<seed:tool_call>"),
    ("glm45", "<arg_key>", "</arg_key>\\n"),
    ("glm45", "<arg_key>", "</arg_key>\n"),
    ("glm47", "<arg_key>"),
    ("qwen3_coder", "<function=", "<parameter="),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ("openai", "<|channel|>", "to=functions."),
    ("openai", "<|channel|>", "commentary"),
    ("gemma4", "<|tool_call>call:"),
    ("functiongemma", "<start_function_call>"),
    ("llama4_pythonic", "<|python_start|>", "<|python_end|>", "func_name"),
    ("pythonic", "[func_name1("),
    ("llama4_json", "<|header_start|>"),
    ("olmo3", "<function_calls>"),
    ("granite4", "<|start_of_role|>", "<tool_call>"),
    ("granite", "<|start_of_role|>"),
    ("phi4_mini_json", "<|/tool|>"),
    ("phi4_mini_json", "functools["),
    ("jamba", "<tool_calls>"),
    ("ernie45", "<tool_call>", "<response>", "</think>"),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "<|eom_id|>"),
    ("llama3_json", "<|start_header_id|>"),
    ("gemma", "<start_of_turn>"),
)
"""Parsers and the texts that templates of their families contain, the more particular ones first."""


_INTRODUCTION = """You can call functions. Here they are, one a line, as JSON:
{tools}

To call functions, answer with nothing but calls, written like this:
{example}
The results come with the next message."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    style: Style,
    *,
    system: bool = True,
) -> list[dict[str, Any]]:
    """`messages`, whose contents are strings, with `tools`, calls and results written into the contents.

    system: tools may be described in a system message of their own; otherwise the first message begins with them.
    """
    shown: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            # Adjacent results make one message, for templates whose roles must alternate.
            if before == "tool":
                shown[-1]["content"] += "\n" + text
            else:
                shown.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            content = "\n".join(filter(None, (message.get("content"), calls_text(message["tool_calls"], style))))
            shown.append({"role": role, "content": content})
        else:
            shown.append(dict(message))
        before = role
    return _with_tools(shown, tools, style, system) if tools else shown


def calls_text(calls: Sequence[Mapping[str, Any]], style: Style) -> str:
    """Calls as a model of this style writes them."""
    texts = []
    for i, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments") or {}
        texts.append(style.head(function["name"], i) + written(arguments, style) + style.finish)
    return style.before + style.between.join(texts) + style.after


def written(arguments: Any, style: Style) -> str:
    """Arguments as a model of this style writes them. A text is taken for arguments that are written already."""
    form = style.form if isinstance(style, TaggedStyle) else None
    if isinstance(arguments, str):
        return arguments
    if isinstance(form, Notation):
        return _noted(arguments, form.quote)
    if isinstance(form, Nested):
        return _nested(arguments, form.mark)
    if form is None or not isinstance(arguments, Mapping):
        return _json(arguments)
    line = "\n" if form.lines else ""
    return "".join(
        f"{form.open}{key}{form.key_end}{form.gap}{form.opening(text=isinstance(value, str))}{line}"
        f"{value if isinstance(value, str) else _json(value)}{line}{form.close}{form.space}"
        for key, value in arguments.items()
    )


def _noted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_noted(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_noted(each, quote) for each in value) + "]"
    return _json(value)


def _nested(value: Any, mark: str) -> str:
    """Elements without a value of null are left out of objects."""
    if isinstance(value, Mapping):
        pairs = [(key, each) for key, each in value.items() if each is not None]
        return "".join(f"{mark}<{key}>{_nested(each, mark)}{mark}</{key}>" for key, each in pairs)
    if isinstance(value, list):
        return "".join(f"{mark}<item>{_nested(each, mark)}{mark}</item>" for each in value)
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_tools(
    shown: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], style: Style, system: bool
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = style.form if isinstance(style, TaggedStyle) else None
    arguments = written({"PARAMETER": "VALUE"}, style) if form else "{ARGUMENTS}"
    example = style.before + style.head("NAME") + arguments + style.finish + style.after
    text = _INTRODUCTION.format(tools=functions, example=example)
    if shown and shown[0].get("role") in ("system", "developer"):
        return [{**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{text}".lstrip()}, *shown[1:]]
    if shown and not system:
        return [{**shown[0], "content": f"{text}\n\n{shown[0].get('content') or ''}"}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]
