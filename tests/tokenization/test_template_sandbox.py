"""What a chat template may cost, and that those of real models' kinds are rendered as ever."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.chat_template import ChatTemplate

REASON = re.compile(r"the chat template (fails: (it |'.+' would make |No filter)|does not compile: No filter)")
ROOT = Path(__file__).parents[2]
NAMES = "{% set ns = namespace(x='ab', l=[1], m=[1], t=(1,)) %}"
NESTED = NAMES + (
    "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% set ns.x = i %}{% endfor %}"
)
"""Lists that hold one list twice, sixty deep: two names, and as much to write as there are atoms."""
MILLION = "{% set s = 'a' * 999999 %}{% for a in range(999999) %}"

WIDE = [
    "{{ 'a'.zfill(8000000000) }}",
    "{{ '%1900000000d' % 1 }}",
    "{{ '%.1900000000f' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '%1900000000d' is divisibleby(1) }}",
    "{{ '%1900000000d' is odd }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{x:>9999999999}'.format_map({'x': 1}) }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a'.rjust(9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'|center(9999999999) }}",
    "{{ '\t'.expandtabs(9999999999) }}",
    "{{ ('\t' * 99999).expandtabs(65536) }}",
    "{{ 'a'|indent(9999999999, true) }}",
    "{{ ('\n' * 99999)|indent('x' * 99999, true, true) }}",
    "{{ 'a b'|wordwrap(1, true, 'x' * 999999) }}",
    "{{ [1]|batch(9999999999, 'x')|list }}",
    "{{ [1]|slice(9999999999)|list }}",
    "{{ {'a': 1}|tojson(indent=9999999999) }}",
    "{{ {'a': 1}|tojson(separators=('x' * 999999, ':')) }}",
    "{{ strftime_now('%9999999999d') }}",
    "{{ 5|round(-1000000000) }}",
    "{{ 5.5|round(999999999, 'ceil') }}",
    "{{ 'x'|round(9) }}",
]
"""A few characters that ask for billions."""

MANY = [
    "{{ 'a' * 10**10 }}",
    "{{ 10 ** (10 ** 8) }}",
    NAMES + "{% set ns.x = 3 %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    NAMES + "{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    NAMES + "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    NAMES + "{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    NAMES + "{% for i in range(40) %}{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
    NAMES + "{% for i in range(30) %}{% set ns.x = ns.x + ns.x %}{% set ns.l = ns.l + [ns.x] %}{% endfor %}",
    "{{ (5).to_bytes(9999999999, 'big') }}",
    "{{ 'a'.encode().zfill(9999999999) }}",
    "{{ 'a'.translate({97: 'b' * 999999}) }}",
    "{{ (['a'] * 99999)|join('x' * 99999) }}",
    "{{ ('x' * 99999).join('a' * 99999) }}",
    "{{ ('a' * 99999)|replace('a', 'x' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'x' * 99999) }}",
    "{{ (['x' * 9] * 99999)|map('replace', 'x', 'y' * 9999)|join }}",
    "{{ ([[1]] * 99999)|sum(start=[]) }}",
    "{% for m in ['x' * 999999, 1] %}{{ ('{0.previtem}' * 9999).format(loop) }}{% endfor %}",
]
"""Values that grow."""

LONG = [
    "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    MILLION + "{% if 'b' in s %}{% endif %}{% endfor %}",
    MILLION + "{% set t = s[1:] %}{% endfor %}",
    MILLION + "{% set t = s.upper() %}{% endfor %}",
    MILLION + "{% set t = s|upper %}{% endfor %}",
    "{% for a in range(999999) %}{% set x %}" + "y" * 20000 + "{% endset %}{% endfor %}",
    "{{ [-9999999999]|map('quire:turn')|list }}{% for a in range(9999999) %}{% endfor %}",
    NESTED + "{{ messages[ns.l].x }}",
    NESTED + "{{ ns.l == ns.m }}",
]
"""Work without end."""

SLOW = [
    "{% for a in range(999999) %}" + "{% set x = 1 %}" * 3000 + "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "".join(f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(30))
    + "{% block b30 %}{% endblock %}",
    "{% set l = range(99999)|list %}{% for i in l %}{% set m = l|sort %}{% endfor %}",
    NESTED + "{{ ns.l }}",
    NESTED + "{{ ns.l|tojson }}",
    NESTED + "{{ ns }}",
    NESTED + "{{ ns.l|string }}",
    NESTED + "{{ ns.l ~ 'x' }}",
    NESTED + "{{ '%s' % (ns.l,) }}",
    NESTED + "{{ '{}'.format(ns.l) }}",
    NESTED + "{{ raise_exception(ns.l) }}",
    NESTED + "{{ ns.l in [ns.m] }}",
    NESTED + "{{ ns.l is eq(ns.m) }}",
    NESTED + "{% for i in range(2) %}{{ loop.changed(ns.l if i else ns.m) }}{% endfor %}",
    NAMES + "{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {ns.t: 1} }}",
    NAMES + "{% for i in range(60) %}{% set ns.t = (ns.t,) * 2 %}{% endfor %}{{ dict([[ns.t, 1]]) }}",
    NAMES
    + "{% macro f() %}{% set ns.t = varargs %}{% endmacro %}{% for i in range(60) %}{{ f(ns.t, ns.t) }}{% endfor %}"
    + "{{ {}.get(ns.t) }}",
]
"""More of the kind, of a second or so each."""


def outcomes(sources: list[str]) -> list[dict[str, Any]]:
    """What becomes of each, in processes with little memory and processor time."""
    command = [sys.executable, "-m", "tests.tokenization.hostile"]
    done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, cwd=ROOT, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_bounded(sources: list[str]) -> None:
    for source, outcome in zip(sources, outcomes(sources), strict=True):
        said, shown = outcome["said"], source[-120:]
        assert REASON.match(said), (shown, said)
        assert "more memory than there is" not in said and "\n" not in said, (shown, said)
        assert outcome["mib"] < 200, (shown, outcome)


@pytest.mark.parametrize("sources", [WIDE, MANY, LONG], ids=["wide", "many", "long"])
def test_no_template_takes_more_than_a_bounded_time_and_memory(sources: list[str]) -> None:
    check_bounded(sources)


@pytest.mark.nightly
def test_no_template_takes_more_than_a_bounded_time_and_memory_for_long() -> None:
    check_bounded(SLOW)


LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and strict is defined -%}
        {{ raise_exception("roles must alternate user/assistant") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

MISTRAL = """
{%- set system = messages[0]["content"] if messages[0]["role"] == "system" else none %}
{%- set rest = messages[1:] if system else messages %}
{%- set user_messages = rest | selectattr("role", "equalto", "user") | list %}
{%- macro shown(tool) %}
    {{- '{"type": "function", "function": {' }}
    {%- for key, val in tool.function.items() if key != "return" %}
        {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
        {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
        {%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- "}}" }}
{%- endmacro %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- shown(tool) }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (system + "\\n\\n" if system and loop.last else "") + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {{- ', "id": "' + (call.id or "000000000")[:9] + '"}' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {%- set content = message.content.content if message.content.content is defined else message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

IDIOMS = """
{%- set names = messages | map(attribute='role') | unique | join(', ') -%}
{{ names }}|{{ messages | rejectattr('role', 'equalto', 'user') | map('upper') | list | length }}
{%- for group in messages | groupby('role') %}{{ group.grouper }}{{ group.list | length }}{% endfor -%}
{%- for k, v in {'b': 1, 'a': 2.5} | dictsort %}{{ k }}={{ v | round(1) }};{% endfor -%}
{{ ['b', 'a'] | sort | first }}{{ [3, 1] | max }}{{ [1, 2] | sum }}
{{- 'x' | default('y') }}{{ nothing | default('z', true) }}
{{- '%s has %05.1f' % ('pi', 3.14) }}{{ '{} and {x:>4}'.format(1, x='r') }}{{ 'a-b'.replace('-', '+') }}
{{- 'one\\ntwo' | indent(2) }}{{ 'ab' | center(6) }}{{ 'Title case' | title }}{{ 'x,y'.split(',') | join(' ') }}
{{- 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 8 }}{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' in 'cat' }}{{ 'k' in {'k': 1} }}
{{- [1, 2, 3, 4, 5][1:4] }}{{ 'abc'[::-1] }}{{ messages[-1:] | length }}{{ range(3) | list }}{{ (1, 2) + (3,) }}
{%- set j = joiner('; ') %}{% for x in [1, 2] %}{{ j() }}{{ x }}{{ loop.cycle('a', 'b') }}{% endfor %}
{%- for x in 'abc' if x != 'b' %}{{ loop.index }}{{ x }}{{ loop.last }}{% endfor %}
{%- call(x) shown_by() %}{{ x }}{% endcall -%}
"""
IDIOMS = "{% macro shown_by() %}<{{ caller('c') }}>{% endmacro %}" + IDIOMS

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " You are terse. "},
    {"role": "user", "content": "What is the weather in Zürich & Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_12345678", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
        ],
    },
    {"role": "tool", "content": "17 degrees"},
    {"role": "assistant", "content": "<think>\nwarm?\n</think>\n\n17 °C <b>"},
    {"role": "user", "content": "Thanks 😀"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def plainly(source: str, names: Mapping[str, Any]) -> str:
    """By jinja alone."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    return environment.from_string(source).render(strftime_now=lambda form: "22 Nov 2026", **names)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "messages", [TALK, TALK[:2], TALK[1:2], [TALK[0], *TALK[4:]]], ids=["all", "two", "one", "thought"]
)
@pytest.mark.parametrize(
    "source", [LLAMA, QWEN, GEMMA, MISTRAL, IDIOMS], ids=["llama", "qwen", "gemma", "mistral", "idioms"]
)
def test_templates_of_the_kinds_that_models_have_are_rendered_as_by_jinja_alone(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    known = {"date_string": "22 Nov 2026"}
    template = ChatTemplate(source + "{{ '' if tools }}", TOKENS)  # so that it knows of tools
    made = template.render(messages, tools=tools, chat_template_kwargs=known)
    names = {**TOKENS, **known, "messages": messages, "tools": tools, "add_generation_prompt": True}
    assert made == plainly(source, names) and made.strip()


@pytest.mark.parametrize("source", [LLAMA, QWEN, GEMMA, MISTRAL], ids=["llama", "qwen", "gemma", "mistral"])
def test_long_conversations_are_rendered(source: str) -> None:
    template = ChatTemplate(source, TOKENS)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>x</think>yes"}]
    assert template.render(turns * 1000).count("hi") >= 1000
    book = [{"role": "user", "content": "word " * 300_000}, turns[1], turns[0]]
    assert template.render(book).count("word") == 300_000


def test_a_filter_that_templates_do_not_have_is_named_when_the_model_is_loaded() -> None:
    with pytest.raises(InvalidModel, match="does not compile: No filter named 'urlize'"):
        ChatTemplate("{{ messages[0].content|urlize }}")


def test_a_rendering_that_is_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> str:
        raise MemoryError

    monkeypatch.setattr("quire.tokenization.template_sandbox.Budget.spend", full)
    with pytest.raises(InvalidRequest, match="the chat template fails: it takes more memory than there is"):
        ChatTemplate("x").render([{"role": "user", "content": "hi"}])
