"""How each family of models writes tool calls.

The names are those of vLLM's registry, and `nemotron_json` is that of NVIDIA's plugin for it. vLLM has none for
`gemma`, `cohere_command_r`, `functionary_v3_1`, `functionary_v3_2` and `solar_open`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quire.parsers.suffix import DECLARED, styled
from quire.parsers.tools.kinds import json_text, kind_of
from quire.types import UNLIMITED

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

    name: str
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


CDATA = ("<![CDATA[", "]]>")
"""What stands around a text that contains `<`, `&` or a line break, where a format has it so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments as one element for each parameter: open, key, key_end, gap, the value's opening, value, close, space.

    value_open: what a value begins with; typed: instead of it, by the JSON type, in formats that mark types. lines:
    a line break after the key's end and one before `close` belong to the format. escaped: keys are escaped as in XML's
    attributes. cdata: texts may stand within `CDATA`. Strings are written as they are, all other values as JSON.
    """

    open: str
    key_end: str
    gap: str = ""
    value_open: str = ""
    typed: Mapping[str, str] = field(default_factory=dict)
    close: str
    space: str = "\n"
    lines: bool = False
    escaped: bool = False
    cdata: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """All that a value may begin with; none if that is nothing."""
        return tuple(dict.fromkeys(filter(None, (*self.typed.values(), self.value_open))))

    def opening(self, kind: str) -> str:
        """What a value of a JSON type begins with."""
        return self.typed.get(kind, self.value_open)

    def head(self, key: str) -> str:
        """What stands before a value's opening."""
        return self.open + (html.escape(key).replace("&#x27;", "'") if self.escaped else key) + self.key_end + self.gap

    def written(self, key: str, value: Any) -> str:
        """One parameter."""
        text = value if isinstance(value, str) else json_text(value)
        line = "\n" if self.lines else ""
        begin, end = CDATA if self.cdata and isinstance(value, str) and set(value) & set("<&\n") else ("", "")
        opening = self.opening(kind_of(value))
        return f"{self.head(key)}{opening}{line}{begin}{text}{end}{line}{self.close}{self.space}"


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


def _sections(
    section: tuple[str, str], call: tuple[str, str, str], *, line: str = "\n", each: bool = False, **about: Any
) -> TaggedStyle:
    """Calls within a section, whose tags are given. call: what one begins with, what its name ends with, and its end.

    line: what follows the tags. each: every call has a section of its own. about: the other fields.
    """
    opening, ending = section
    begin, head_end, end = call
    shared = {"begin": begin, "head_ends": (head_end,), "opens": (opening,), "closes": (end, ending)}
    shared |= {
        "before": opening + line,
        "start": f"{begin}{{name}}{head_end}{line}",
        "finish": end + line,
        "after": ending,
    }
    if each:
        shared |= {"finish": end, "between": f"{line}{ending}{line}{opening}{line}", "after": line + ending}
    return TaggedStyle(**{**shared, **about})


_QWEN3_CODER = _sections(
    ("<tool_call>", "</tool_call>"),
    ("<function=", ">", "</function>"),
    each=True,
    name="qwen3_coder",
    models="Qwen 3 Coder, Qwen 3.5",
    form=Parameters(open="<parameter=", key_end=">", close="</parameter>", lines=True),
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

_GLM47 = replace(
    _GLM45,
    name="glm47",
    models="GLM 4.7",
    form=Parameters(open="<arg_key>", key_end="</arg_key>", value_open="<arg_value>", close="</arg_value>", space=""),
    start="<tool_call>{name}",
    between="",
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

_HY = DECLARED


def _dsml(space: str) -> tuple[tuple[str, str, str], Parameters]:
    """A call of DeepSeek's: what it begins with, what its name ends with, and its end; and its parameters."""
    call = (f'<｜DSML｜{space}invoke name="', '">', f"</｜DSML｜{space}invoke>")
    return call, Parameters(
        open=f'<｜DSML｜{space}parameter name="',
        key_end='"',
        gap=" ",
        value_open='string="false">',
        typed={"string": 'string="true">'},
        close=f"</｜DSML｜{space}parameter>",
    )


def _xtml(tag: str) -> tuple[str, str]:
    """An element's opening and end of Kimi K3."""
    return f"<|open|>{tag}<|sep|>", f"<|close|>{tag}<|sep|>"


(_DSML_INVOKE, _DSML), (_DSML41_INVOKE, _DSML41) = _dsml(""), _dsml(" ")

_HY3 = _sections(
    (f"<tool_calls{_HY}>", f"</tool_calls{_HY}>"),
    (f"<tool_call{_HY}>", f"<tool_sep{_HY}>", f"</tool_call{_HY}>"),
    name="hy_v3",
    models="Hy3",
    special=True,
    form=Parameters(
        open=f"<arg_key{_HY}>",
        key_end=f"</arg_key{_HY}>",
        gap="\n",
        value_open=f"<arg_value{_HY}>",
        close=f"</arg_value{_HY}>",
    ),
)

_GLIMMER = _sections(
    ("<atem:function_calls>", "</atem:function_calls>"),
    ('<atem:invoke name="', '">', "</atem:invoke>"),
    name="muse_glimmer",
    models="Muse Glimmer",
    special=True,
    form=Parameters(open='<atem:parameter name="', key_end='">', close="</atem:parameter>"),
    before="",
    start=' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
    finish="</atem:invoke>\n</atem:function_calls>",
    between="<|eom|><|start|>assistant",
    after="",
)

_ALL: Sequence[Style] = (
    HERMES,
    replace(HERMES, name="qwen3_json", models="Qwen 3"),
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
    replace(_QWEN3_CODER, name="step5", models="Step 5"),
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
    _sections(
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<function=", ">", "</function>"),
        each=True,
        name="seed_oss",
        models="Seed-OSS",
        form=Parameters(open="<parameter=", key_end=">", close="</parameter>"),
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
    _sections(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        _DSML_INVOKE,
        name="deepseek_v32",
        models="DeepSeek V3.2",
        form=_DSML,
    ),
    _sections(
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        _DSML_INVOKE,
        name="deepseek_v4",
        models="DeepSeek V4",
        form=_DSML,
    ),
    _sections(
        ("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
        _DSML41_INVOKE,
        name="deepseek_v41",
        models="DeepSeek V4.1",
        form=_DSML41,
    ),
    _GLM45,
    _GLM47,
    replace(_GLM47, name="poolside_v1", models="Laguna"),
    replace(_GLM47, name="ling3", models="Ling 3"),
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
    _sections(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<invoke name="', '">', "</invoke>"),
        name="minimax_m2",
        models="MiniMax M2",
        form=Parameters(open='<parameter name="', key_end='">', close="</parameter>"),
    ),
    _sections(
        (f"{_M3}<tool_call>", f"{_M3}</tool_call>"),
        (f'{_M3}<invoke name="', '">', f"{_M3}</invoke>"),
        name="minimax_m3",
        models="MiniMax M3",
        special=True,
        form=Nested(_M3),
        start=f'{_M3}<invoke name="{{name}}">',
    ),
    _HY3,
    replace(
        _HY3,
        name="hy_v4",
        models="Hy4",
        head_ends=(f"<arg_key{_HY}>", f"</tool_call{_HY}>"),
        start=f"<tool_call{_HY}>{{name}}",
        form=Parameters(
            open=f"<arg_key{_HY}>",
            key_end=f"</arg_key{_HY}>",
            value_open=f"<arg_value{_HY}>",
            close=f"</arg_value{_HY}>",
            space="",
        ),
    ),
    _sections(
        _xtml("tools"),
        ('<|open|>call tool="', "<|sep|>", "<|close|>call<|sep|>"),
        line="",
        name="kimi_k3",
        models="Kimi K3",
        special=True,
        named=r'(?P<name>[\w.:/-]{1,256})"(?: index="\d{1,9}")?\s*',
        start='<|open|>call tool="{name}" index="{index}"<|sep|>',
        closes=("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        form=Parameters(
            open='<|open|>argument key="',
            key_end='"',
            gap=" ",
            typed={kind: f'type="{kind}"<|sep|>' for kind in ("string", "number", "boolean", "object", "array", "null")}
            | {"integer": 'type="number"<|sep|>'},
            close="<|close|>argument<|sep|>",
            space="",
            escaped=True,
        ),
    ),
    TaggedStyle(
        name="minicpm5",
        models="MiniCPM 5",
        begin='<function name="',
        head_ends=('">',),
        form=Parameters(open='<param name="', key_end='">', close="</param>", space="", cdata=True),
        closes=("</function>",),
        start='<function name="{name}">',
        finish="</function>",
        between="\n",
    ),
    TaggedStyle(
        name="solar_open2",
        models="Solar Open 2",
        special=True,
        begin="<|tool_call:start|>",
        head_ends=("\n", "<|tool_call:end|>"),
        form=Parameters(open="<|tool_arg:start|>", key_end="<|tool_arg:value|>", close="<|tool_arg:end|>"),
        closes=("<|tool_call:end|>",),
        start="<|tool_call:start|>{name}\n",
        finish="<|tool_call:end|>",
        between="\n",
    ),
    TaggedStyle(
        name="solar_open",
        models="Solar Open",
        special=True,
        begin="<|tool_call:begin|>",
        head_ends=("<|tool_call:args|>",),
        named=r"\s*\w{0,64}<\|tool_call:name\|>(?P<name>[\w.:/-]{1,256})\s*",
        opens=("<|tool_calls|>",),
        closes=("<|tool_call:end|>", "<|calls|>"),
        id_length=10,
        call_id="{random}",
        before="<|tool_calls|>",
        start="<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>",
        finish="<|tool_call:end|>",
        after="<|calls|>",
    ),
    _GLIMMER,
    replace(_GLIMMER, name="muse", models="Muse Spark"),
    replace(_GLIMMER, name="musespark1x", models="Muse Spark"),
    ToolStyle(
        name="inkling",
        models="Inkling",
        special=True,
        marks={"<|content_invoke_tool_json|>": "any"},
        end="<|end_message|>",
        start='{name}<|content_invoke_tool_json|>{"name": "{name}", "args": ',
        finish="}<|end_message|>",
        between="<|message_model|>",
    ),
    _sections(
        ("<dots_function_call>", "</dots_function_call>"),
        ('<invoke name="', '">', "</invoke>"),
        name="dots",
        models="dots",
        form=Parameters(open='<parameter name="', key_end='">', close="</parameter>"),
    ),
    _sections(
        ("<ifm|tool_calls>", "</ifm|tool_calls>"),
        ("<ifm|tool_call>", "\n", "</ifm|tool_call>"),
        name="k2_horizon",
        models="K2 Horizon, with its template's `tool_call_format` left at `xml`",
        special=True,
        head_ends=("\n", "<ifm|arg_key>", "</ifm|tool_call>"),
        start="<ifm|tool_call>{name}\n",
        form=Parameters(
            open="<ifm|arg_key>",
            key_end="</ifm|arg_key>",
            gap="\n",
            value_open="<ifm|arg_value>",
            close="</ifm|arg_value>",
        ),
    ),
    TaggedStyle(
        name="plamo3",
        models="PLaMo 3",
        special=True,
        begin="<|plamo:begin_tool_request:plamo|>",
        head_ends=("<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",),
        named=r"\s*<\|plamo:begin_tool_name:plamo\|>(?P<name>[\w.:/-]{1,256})<\|plamo:end_tool_name:plamo\|>\s*",
        opens=("<|plamo:begin_tool_requests:plamo|>",),
        closes=(
            "<|plamo:end_tool_arguments:plamo|>",
            "<|plamo:end_tool_request:plamo|>",
            "<|plamo:end_tool_requests:plamo|>",
        ),
        before="<|plamo:begin_tool_requests:plamo|>",
        start="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        finish="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        after="<|plamo:end_tool_requests:plamo|>",
    ),
    TaggedStyle(
        name="functionary_v3_2",
        models="Functionary 3.2",
        begin=">>>",
        head_ends=("\n",),
        start="{name}\n",
        finish="",
        between=">>>",
    ),
    TaggedStyle(
        name="functionary_v3_1",
        models="Functionary 3.1",
        begin="<function=",
        head_ends=(">",),
        closes=("</function>",),
        start="<function={name}>",
        finish="</function>",
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
    replace(
        _JAMBA,
        name="nemotron_json",
        models="Nemotron Nano 2",
        marks={"<TOOLCALL>": "any"},
        end="</TOOLCALL>",
        before="<TOOLCALL>[",
        after="]</TOOLCALL>",
    ),
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
    ToolStyle(
        name="cohere_command_r",
        models="Command R and R+",
        marks={"Action:\n```json": "any", "Action: ```json": "any"},
        end="```",
        name_key="tool_name",
        before="Action:\n```json\n[\n    ",
        start='{"tool_name": "{name}", "parameters": ',
        between=",\n    ",
        after="\n]```",
    ),
    _APERTUS,
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

STYLES: Mapping[str, Style] = {style.name: style for style in _ALL}


def tool_style(parser: str) -> Style:
    """The style of a parser's name, which may have a suffix (`parsers.suffix`). Raises KeyError."""
    style = styled(STYLES, parser)
    if style is None:
        raise KeyError(parser)
    return style


def style_of(template: str | None) -> Style:
    """The style of a chat template; Hermes where the template does not show one."""
    return sign_of(template) or HERMES


def sign_of(template: str | None) -> Style | None:
    """The style that a chat template shows, by the first of `_SIGNS` whose texts it contains."""
    found = (name for name, *texts in _SIGNS if template is not None and all(text in template for text in texts))
    return next((STYLES[name] for name in found), None)


_SIGNS: Sequence[tuple[str, ...]] = (
    ("minimax_m2", "<minimax:tool_call>"),
    ("minimax_m3", "]<]minimax[>["),
    # The template of MiniCPM 5 names Hy3's marks, too.
    ("minicpm5", "<function name=", "<param name="),
    ("hy_v3", "<tool_sep"),
    ("inkling", "<|content_invoke_tool_json|>"),
    ("dots", "<dots_function_call>"),
    ("k2_horizon", "<ifm|tool_call"),
    ("plamo3", "plamo:begin_tool_request"),
    ("deepseek_v41", "｜DSML｜ calls"),
    ("kimi_k3", "<|open|>", "argument"),
    ("solar_open2", "<|tool_arg:start|>"),
    ("solar_open", "<|tool_call:args|>"),
    ("muse_glimmer", "<atem:invoke"),
    ("functionary_v3_2", ">>>all"),
    ("functionary_v3_1", "<function=", "<|eom_id|>"),
    ("nemotron_json", "<TOOLCALL>"),
    ("cohere_command4", "<|START_ACTION|>", "<|START_TEXT|>"),
    ("cohere_command3", "<|START_ACTION|>"),
    ("cohere_command_r", "<|CHATBOT_TOKEN|>", "Action:", "tool_name"),
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
