"""What operations of templates are charged for, in units of work and characters written, as written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireError
from quire.tokenization import chat_template, template_sandbox
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.template_sandbox import extent
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Grüße, wie geht es?"},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "a\nb"},
]
TEMPLATES = [
    "",
    "{{ messages[0].content }}",
    "{{ messages[0].content ~ 1 ~ messages[1].content }}",
    "{{ messages[0]['content'] + 'x' * 30 }}",
    "{{ messages|tojson }}",
    "{{ messages|tojson(indent=2) }}",
    "{{ messages|map(attribute='content')|join(', ') }}",
    "{{ messages|map(attribute='content')|list|length }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{% for m in messages %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content|trim }}{% else %}none{% endfor %}",
    "{% for m in messages|reverse %}{{ m.content|upper }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for i in range(20) %}{{ i }}{% endfor %}",
    "{% for i in range(3) %}{% for j in range(4) %}{{ i * j }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m|length %}{% endfor %}{{ ns.n }}",
    "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say('a') }}{{ say(messages[1].content) }}",
    "{% macro deep(n) %}{{ n }}{% if n %}{{ deep(n - 1) }}{% endif %}{% endmacro %}{{ deep(5) }}",
    "{% set b %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ b }}{{ b|length }}",
    "{{ 'a,b,c'.split(',') }}{{ 'a b c'.split()|last }}{{ 'x'.join(['a', 'b']) }}",
    "{{ messages[0].content.replace('e', 'ee') }}{{ 'aaa'|replace('a', 'bb') }}",
    "{{ '%s and %5d' % ('x', 7) }}{{ '%s'|format(5) }}{{ '{} {:>6}'.format(1, 2) }}",
    "{{ messages[0].content[2:7] }}{{ messages[0].content[::-1] }}{{ messages[1:]|length }}",
    "{{ 'wie' in messages[0].content }}{{ 'x' not in messages }}{{ 3 in [1, 2, 3] }}",
    "{{ messages|sort(attribute='role')|first }}{{ [3, 1, 2]|sort|join }}{{ [1, 2, 3]|sum }}",
    "{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 7 / 2 }}{{ -3|abs }}{{ 3.7|int }}{{ '5'|int + 1 }}",
    "{{ 3.14159|round(2) }}{{ 'a b'|title }}{{ 'abc'|capitalize }}{{ ' a '|trim }}{{ 'a'|indent(4, true) }}",
    "{{ messages|length > 2 and messages[0].role == 'user' or none is none }}",
    "{{ messages[0] is mapping }}{{ 5 is divisibleby(5) }}{{ 'a' is string }}{{ x is defined }}{{ x|default('d') }}",
    "{{ [1, 2, 3, 4, 5]|batch(2)|list }}{{ [1, 2, 3]|slice(2)|list }}{{ {'b': 1, 'a': 2}|dictsort }}",
    "{{ ['a', 'b', 'a']|unique|list }}{{ [1, 2]|map('string')|join }}{{ 'abc'|list }}{{ [[1], [2]]|sum(start=[]) }}",
    "{{ messages|groupby('role')|length }}{{ 'a b c'|wordcount }}{{ 'abcdef'|truncate(3, true, '') }}",
    "{{ 'x'.center(9) }}|{{ 'x'|center(9) }}|{{ '7'.zfill(4) }}|{{ 'a\tb'.expandtabs(4) }}",
    "{{ dict(a=1, b=2).items()|list }}{{ {'a': 1}.get('b', 'c') }}{{ {'a': {'b': 1}}.a.b }}",
    "{%- generation -%}{{ messages[1].content }}{%- endgeneration -%}",
    "{{ raise_exception('no: ' ~ messages|length) }}",
    "{{ messages[9].content }}",
    "{{ messages[0].nothing.nothing }}",
    "{{ 1 / 0 }}",
    "{% for i in range(99999999) %}{% endfor %}",
    "{{ 'a' * 99999999 }}",
    "{{ 'ab' * 3 }}{{ 3 * 'ab' }}{{ [1, 2] * 2 }}{{ 'ab' * -3 }}{{ 2 * 3 }}",
    "{{ 0.5 * 99999999 }}{{ 99999999 * 0.5 }}{{ 0.5 * 0.25 }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__ }}",
    "{% include 'x' %}",
]


def test_operations_are_charged_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[template_sandbox.Budget] = []

    class Kept(template_sandbox.Budget):
        def __init__(self, read: int) -> None:
            super().__init__(read)
            made.append(self)
            self.begin = self._work, self._left

    for module in (template_sandbox, chat_template):
        if hasattr(module, "Budget"):
            monkeypatch.setattr(module, "Budget", Kept)
    lines = []
    for source in TEMPLATES:
        made.clear()
        try:
            said = repr(ChatTemplate(source).render(MESSAGES))
        except QuireError as error:
            said = f"{type(error).__name__}: {error}"
        spent = [(one.begin[0] - one._work, one.begin[1] - one._left) for one in made]  # type: ignore[attr-defined]
        lines.append(f"{source!r}\n  {said}\n  {spent}")
    check(EXPECTED / "charges.txt", "\n".join(lines))


def test_the_extent_of_values_is_that_of_all_they_hold_each_time_they_hold_it() -> None:
    twice = ["ab", 1]
    values = ["", "abc", 5, None, [], [1, 2], {}, {"a": 1}, twice, [twice, twice], {"k": twice, "l": (1, 2)}, 1 << 99]
    check(EXPECTED / "extents.txt", "\n".join(f"{value} {extent(value)} {extent(value, 3)}" for value in values))
