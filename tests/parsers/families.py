"""How chat templates of each family render a conversation with calls, written by hand as small templates.

Each template is ours and shows one fact: how the family's own template writes an assistant's calls back into a prompt,
which is how its models were taught to write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.parsers.parts import Splitter
from quire.parsers.reasoning import THOUGHTS, AnswerSplitter
from quire.parsers.tools.emitter import Tools
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.styles import STYLES

_LOOP = "{% for c in calls %}{% set f = c.function %}"
_END = "{% endfor %}"
_NOTED = (
    "{%- macro noted(v) -%}{%- if v is string -%}QUOTE{{ v }}QUOTE{%- elif v is mapping -%}{ {%- for k, x in "
    "v.items() -%}"
    "{{ ',' if not loop.first }}{{ k }}:{{ noted(x) }}{%- endfor -%} }{%- elif v is sequence -%}[{%- for x in v -%}"
    "{{ ',' if not loop.first }}{{ noted(x) }}{%- endfor -%}]{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)
_PYTHON = (
    "{% for c in calls %}{{ ', ' if not loop.first }}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | python }}{% endfor %})"
    "{% endfor %}"
)


def _object(key: str) -> str:
    return '{"name": "{{ f.name }}", "' + key + '": {{ f.arguments | tojson }}}'


def _listed(key: str) -> str:
    return "{% for c in calls %}{% set f = c.function %}{{ ', ' if not loop.first }}" + _object(key) + "{% endfor %}"


def _xml(before: str, parameter: str, after: str) -> str:
    """Parameters whose texts stand as they are, and whose other values are JSON, but constants are Python's."""
    value = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    each = parameter.replace("VALUE", value)
    return before + "{% for k, v in f.arguments.items() %}" + each + "{% endfor %}" + after


def _gemma(before: str, quote: str, after: str) -> str:
    call = before + "{{ f.name }}{{ noted(f.arguments) }}" + after
    return _NOTED.replace("QUOTE", quote) + _LOOP + call + _END


_QWEN_CODER = _LOOP + (
    "\n"
    + _xml(
        "<tool_call>\n<function={{ f.name }}>\n",
        "<parameter={{ k }}>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    )
    + _END
)


def _dsml(around: str) -> str:
    """Parameters that say whether they are strings."""
    parameter = (
        '<｜DSML｜parameter name="{{ k }}" string="'
        "{{ 'true' if v is string else 'false' }}"
        '">'
        "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n"
    )
    call = _xml('<｜DSML｜invoke name="{{ f.name }}">\n', parameter, "</｜DSML｜invoke>\n")
    return f"\n\n<｜DSML｜{around}>\n" + _LOOP + call + _END + f"</｜DSML｜{around}>"


_M3 = "]<]minimax[>["
_NESTED = (
    "{%- macro nested(v) -%}{%- if v is mapping -%}{%- for k, x in v.items() if x is not none -%}"
    "M3<{{ k }}>{{ nested(x) }}M3</{{ k }}>{%- endfor -%}{%- elif v is iterable and v is not string -%}"
    "{%- for x in v -%}M3<item>{{ nested(x) }}M3</item>{%- endfor -%}"
    "{%- else -%}{{ v if v is string else v | tojson }}{%- endif -%}{%- endmacro -%}"
).replace("M3", _M3)
_COHERE = (
    "<|START_ACTION|>["
    + _LOOP
    + "{{ ',' if not loop.first }}\n    "
    + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + _END
    + "\n]<|END_ACTION|>"
)


def _elements(section: str, call: str, head: str, parameter: str, end: str, after: str) -> str:
    return section + _LOOP + _xml(call + "{{ f.name }}" + head, parameter, end) + _END + after


_GLM47 = _elements("", "<tool_call>", "", "<arg_key>{{ k }}</arg_key><arg_value>VALUE</arg_value>", "</tool_call>", "")
_HY = ":opensource"
_XTML_KIND = (
    "{%- macro kind(v) -%}{%- if v is boolean -%}boolean{%- elif v is none -%}null{%- elif v is number -%}number"
    "{%- elif v is string -%}string{%- elif v is mapping -%}object{%- else -%}array{%- endif -%}{%- endmacro -%}"
)
_HERMES = _LOOP + "\n<tool_call>\n" + _object("arguments") + "\n</tool_call>" + _END

_ATEM = (
    _LOOP
    + _xml(
        '<atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n',
        '<atem:parameter name="{{ k }}">VALUE</atem:parameter>\n',
        "</atem:invoke>\n</atem:function_calls>",
    )
    + _END
)

TEMPLATES: Mapping[str, str] = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "seed_oss": _LOOP
    + _xml(
        "<seed:tool_call>\n<function={{ f.name }}>\n",
        "<parameter={{ k }}>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    )
    + _END,
    "llama3_json": "<|python_tag|>" + _listed("parameters").replace("', '", "'; '"),
    "llama4_json": _listed("parameters").replace("', '", "'; '"),
    "pythonic": "[" + _PYTHON + "]",
    "llama4_pythonic": "<|python_start|>[" + _PYTHON + "]<|python_end|>",
    "olmo3": "<function_calls>"
    + _PYTHON.replace("', ' if not loop.first }}{{ c", "'\\n' if not loop.first }}{{ c")
    + "</function_calls>",
    "mistral": _LOOP + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}" + _END,
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + _LOOP
    + "{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
    "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>" + _END + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + _LOOP
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
    + _END
    + "<｜tool▁calls▁end｜>",
    "glm45": _LOOP
    + _xml("\n<tool_call>{{ f.name }}\n", "<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
    + _END,
    "glm47": _GLM47,
    "poolside_v1": _GLM47,
    "kimi_k2": "<|tool_calls_section_begin|>"
    + _LOOP
    + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    + _END
    + "<|tool_calls_section_end|>",
    "minimax_m2": "\n<minimax:tool_call>\n"
    + _LOOP
    + _xml('<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">VALUE</parameter>\n', "</invoke>\n")
    + _END
    + "</minimax:tool_call>",
    "openai": _LOOP
    + "{{ '<|start|>assistant' if not loop.first }}<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json"
    "<|message|>{{ f.arguments | tojson }}<|call|>" + _END,
    "granite": "<|tool_call|>[" + _listed("arguments") + "]",
    "phi4_mini_json": "functools[" + _listed("arguments") + "]",
    "jamba": "<tool_calls>[" + _listed("arguments") + "]</tool_calls>",
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls").replace("｜DSML｜", "｜DSML｜ "),
    "dots": "<dots_function_call>\n"
    + _LOOP
    + _xml('<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">VALUE</parameter>\n', "</invoke>\n")
    + _END
    + "</dots_function_call>",
    "inkling": _LOOP + "<|content_invoke_tool_json|>" + _object("args") + "<|end_message|>" + _END,
    "k2_horizon": _elements(
        "<ifm|tool_calls>\n",
        "<ifm|tool_call>",
        "\n",
        "<ifm|arg_key>{{ k }}</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>\n",
        "</ifm|tool_call>\n",
        "</ifm|tool_calls>",
    ),
    "plamo3": "<|plamo:begin_tool_requests:plamo|>"
    + _LOOP
    + "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{{ f.name }}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{{ f.arguments | tojson }}"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>" + _END + "<|plamo:end_tool_requests:plamo|>",
    "qwen3_json": _HERMES,
    "ling3": _GLM47,
    "step5": _QWEN_CODER,
    "longcat": _HERMES.replace("tool_call>", "longcat_tool_call>"),
    "mimo": _QWEN_CODER.replace(">\nVALUE\n<", ">VALUE<"),
    "step3p5": _QWEN_CODER,
    "step3": "<｜tool_calls_begin｜>\n"
    + _LOOP
    + _xml(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ f.name }}">\n',
        '<steptml:parameter name="{{ k }}">VALUE</steptml:parameter>\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
    )
    + _END
    + "<｜tool_calls_end｜>",
    "lfm2": "<|tool_call_start|>[" + _PYTHON + "]<|tool_call_end|>",
    "hunyuan_a13b": "<tool_calls>[\n" + _listed("arguments").replace("', '", "',\n'") + "\n]</tool_calls>",
    "minimax": "<tool_calls>\n" + _LOOP + _object("arguments") + "\n" + _END + "</tool_calls>",
    "internlm": _LOOP + "<|action_start|><|plugin|>\n" + _object("parameters") + "<|action_end|>\n" + _END,
    "granite-20b-fc": _LOOP + "<function_call> " + _object("arguments") + _END,
    "gigachat3": _LOOP + "function call<|role_sep|>\n" + _object("arguments") + _END,
    "xlam": "[" + _listed("arguments") + "]",
    "gemma": "```tool_code\n[" + _PYTHON + "]\n```",
    "gemma4": _gemma("<|tool_call>call:", '<|"|>', "<tool_call|>"),
    "ernie45": _HERMES,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "apertus": "<|tools_prefix|>["
    + _LOOP
    + "{{ ', ' if not loop.first }}"
    + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
    + _END
    + "]<|tools_suffix|>",
    "minimax_m3": _NESTED
    + f"{_M3}<tool_call>\n"
    + _LOOP
    + f'{_M3}<invoke name="{{{{ f.name }}}}">{{{{ nested(f.arguments) }}}}{_M3}</invoke>\n'
    + _END
    + f"{_M3}</tool_call>",
    "hy_v3": _elements(
        f"<tool_calls{_HY}>\n",
        f"<tool_call{_HY}>",
        f"<tool_sep{_HY}>\n",
        f"<arg_key{_HY}>{{{{ k }}}}</arg_key{_HY}>\n<arg_value{_HY}>VALUE</arg_value{_HY}>\n",
        f"</tool_call{_HY}>\n",
        f"</tool_calls{_HY}>",
    ),
    "hy_v4": _elements(
        f"<tool_calls{_HY}>\n",
        f"<tool_call{_HY}>",
        "",
        f"<arg_key{_HY}>{{{{ k }}}}</arg_key{_HY}><arg_value{_HY}>VALUE</arg_value{_HY}>",
        f"</tool_call{_HY}>\n",
        f"</tool_calls{_HY}>",
    ),
    "kimi_k3": _XTML_KIND
    + "<|open|>tools<|sep|>"
    + _LOOP
    + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in f.arguments.items() %}'
    '<|open|>argument key="{{ k }}" type="{{ kind(v) }}"<|sep|>{{ v if v is string else v | tojson }}'
    "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>" + _END + "<|close|>tools<|sep|>",
    "minicpm5": _LOOP + '<function name="{{ f.name }}">{% for k, v in f.arguments.items() %}<param name="{{ k }}">'
    "{% if v is string and ('<' in v or '&' in v or '\n' in v) %}{{ '<![CDATA[' + v + ']]>' }}{% else %}{{ v }}"
    "{% endif %}</param>{% endfor %}</function>\n" + _END,
    "solar_open2": _elements(
        "",
        "<|tool_call:start|>",
        "\n",
        "<|tool_arg:start|>{{ k }}<|tool_arg:value|>VALUE<|tool_arg:end|>\n",
        "<|tool_call:end|>\n",
        "",
    ),
    "solar_open": "<|tool_calls|>"
    + _LOOP
    + "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}"
    "<|tool_call:end|>" + _END + "<|calls|>",
    **dict.fromkeys(("muse_glimmer", "muse", "musespark1x"), _ATEM),
    "functionary_v3_1": _LOOP + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>" + _END,
    "functionary_v3_2": _LOOP + ">>>{{ f.name }}\n{{ f.arguments | tojson }}" + _END,
    "nemotron_json": "<TOOLCALL>[" + _listed("arguments") + "]</TOOLCALL>",
    "cohere_command_r": "Action:\n```json\n[\n"
    + _LOOP
    + "{{ ',\n' if not loop.first }}    {\n        "
    + '"tool_name": "{{ f.name }}",\n        "parameters": {{ f.arguments | tojson }}\n    }'
    + _END
    + "\n]```\n",
    "functiongemma": _gemma("<start_function_call>call:", "<escape>", "<end_function_call>"),
}

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hot": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "note": {},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "at": {"type": "number"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS = {name: schema["properties"] for name, schema in SCHEMAS.items()}
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "weather",
        {
            "city": 'São "Paulo"\n<b>{1}</b>, it\'s',
            "days": 3,
            "hot": True,
            "places": [{"name": "a, b: c", "at": -1.5}, {"name": ""}],
        },
    ),
    ("now", {}),
    ("weather", {"city": "7", "days": -2, "hot": None, "places": [], "note": [None, {"x": False}]}),
)


def answer_reader(name: str, tools: Tools) -> Splitter:
    """Reads an answer with the tool parser `name`, and where the family has messages of its own, with those."""
    reader = reader_of(STYLES[name], tools)
    style = THOUGHTS.get(name)
    return reader if style is None or style.channels is None else AnswerSplitter(style.splitter(inside=False), reader)
