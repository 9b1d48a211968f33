from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.chat_template import ChatTemplate, text_of
from quire.tokenization.gguf_vocabulary import template_facts
from quire.tokenization.vocabularies import from_gguf
from tests.tokenization.vocabulary import CHATML, byte_level, save

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO if messages is None else messages, **options)


def test_messages_are_rendered_and_the_answer_is_begun() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_last_message_can_be_left_open() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hi there "}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nhi there ")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
def test_what_a_call_has_as_arguments_is_not_dropped_within_the_templates_own(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}: send {name} as a field") as refused:
        render(CHATML, chat_template_kwargs={name: "x"})
    assert refused.value.param == "chat_template_kwargs"
    assert render("{{ x }}", chat_template_kwargs={"x": 1, "add_generation_prompt": True, "tools": None}) == "1"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render("fixed", continue_final_message=True)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{{ '' + a }}", '{"city": "Ulm"}'),
        ("{{ a | tojson }}", '{"city": "Ulm"}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "city=Ulm"),
        ("{{ a if a is string else a.city }}", "Ulm"),
        ("{{ raise_exception('no calls') if a is string else a.city }}", "Ulm"),
    ],
)
def test_arguments_of_calls_are_text_where_a_template_joins_them_to_text(written: str, shown: str) -> None:
    """As DeepSeek's and Functionary's templates do."""
    each = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + written + "{% endfor %}"
    source = "{{ tools or '' }}{% for m in messages %}{{ m.content }}" + each + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Ulm"}}}
    assert render(source, [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]) == "hi" + shown


def test_lines_of_tags_leave_no_trace() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_templates_get_what_they_expect() -> None:
    assert render("{{ bos_token }}{{ messages[0] | tojson }}") == '<s>{"role": "user", "content": "hi"}'
    assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}x{{ 1 }}{% endgeneration %}y") == "x1y"
    assert render("{{ thinking }}", chat_template_kwargs={"thinking": 7}) == "7"


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


def test_a_refusal_is_the_callers_error_in_one_line() -> None:
    with pytest.raises(InvalidRequest, match=r"refuses the messages: roles must alternate now$") as caught:
        render("{{ raise_exception('roles must alternate\nnow') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages.__class__ }}",
        "{{ messages|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set x = [0] * 99999 %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            marks=pytest.mark.nightly,
        ),
        "{% for a in 'ab' recursive %}{{ loop('ab') }}{% endfor %}",
    ],
)
def test_hostile_and_broken_templates_are_errors_of_one_line(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidModel, match=r"^the chat template fails: .+; name another with --chat-template$"):
        ChatTemplate(source).try_out()


def test_loops_and_macros_do_as_they_always_did() -> None:
    assert render("{% for k, v in {'a': 1}.items() %}{{ loop.index }}{{ k }}{{ v }}{% else %}none{% endfor %}") == "1a1"
    assert render("{% for x in [] %}{{ x }}{% else %}none{% endfor %}") == "none"
    assert render("{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}") == "12"
    assert render("{% macro c() %}<{{ caller() }}>{% endmacro %}{% call c() %}x{% endcall %}") == "<x>"


def test_a_template_that_refuses_a_plain_message_is_sound() -> None:
    ChatTemplate("{{ raise_exception('a system message first') }}").try_out()


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{% break %}", "{% continue %}", "{% for a in b %}" * 40 + "{% endfor %}" * 40, "{{ 'a" + "{" * 9],
)
def test_a_template_that_does_not_compile_is_a_broken_model(source: str) -> None:
    with pytest.raises(InvalidModel, match="does not compile"):
        ChatTemplate(source)


def test_sources_of_templates_in_order(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = save(tmp_path, byte_level())
    assert ChatTemplate.from_folder(folder) is None
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert _made(ChatTemplate.from_folder(folder)) == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert _made(ChatTemplate.from_folder(folder)) == "J"
    (folder / "mine.jinja").write_text("M")
    assert _made(ChatTemplate.from_folder(folder, override=folder / "mine.jinja")) == "M"
    assert _made(ChatTemplate.from_folder(folder, override="{{ 'O' }}")) == "O"


def test_requests_with_tools_have_the_template_that_a_checkpoint_has_for_them(tmp_path: Path) -> None:
    """Command R's and Hermes 2 Pro's: their default template shows no tools."""
    named = [{"name": "default", "template": "D{{ mood }}"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    folder = save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    tool = {"type": "function", "function": {"name": "f"}}

    def shown(**given: Any) -> list[str]:
        made = ChatTemplate.from_folder(folder, **given)
        assert made is not None
        made.try_out()
        return [made.render(HELLO, tools=tools) for tools in (None, [], [tool])]

    assert shown(kwargs={"mood": "!"}) == ["D!", "D!", "T1"]
    made = ChatTemplate.from_folder(folder)
    assert made is not None and made.arguments == {"mood", "tools"}
    assert (made.source, made.tools_source) == ("D{{ mood }}", "T{{ tools | length }}")
    (folder / "chat_template.jinja").write_text("J{{ tools }}")
    assert shown()[0] == "JNone", "of another file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert shown() == ["JNone", "J[]", "A"]
    assert shown(override="{{ 'O' }}{{ tools }}")[0] == "ONone"
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ nothing.there }}")
    with pytest.raises(InvalidModel, match="the chat template fails"):
        shown()


def test_a_gguf_file_has_both_templates_of_a_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    facts = template_facts(save(tmp_path, byte_level(), tokenizer_config={"chat_template": named}))
    assert facts == {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
    }
    words = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    _, config = from_gguf(facts | {f"tokenizer.ggml.{key}": value for key, value in words.items()})
    made = ChatTemplate.from_folder(tmp_path / "none", default=config["chat_template"])
    assert made is not None and (made.source, made.tools_source) == ("D", "T")


def test_an_override_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"gone\.jinja"):
        ChatTemplate.from_folder(tmp_path, override=tmp_path / "gone.jinja")


def test_what_is_no_template_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), tokenizer_config={"chat_template": 7})
    with pytest.raises(InvalidModel, match="is of type int: not a template"):
        ChatTemplate.from_folder(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidModel, match=r"chat_template\.jinja is not text"):
        ChatTemplate.from_folder(folder)


def _made(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render(HELLO)


def test_content_parts_become_text() -> None:
    assert text_of(None) == ""
    assert text_of("a") == "a"
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    with pytest.raises(InvalidRequest, match="'image_url' is not supported"):
        text_of([{"type": "image_url", "image_url": {"url": "x"}}])


PARTS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows nothing of content that is a string, as templates of SmolVLM and Idefics do."""


def test_a_template_that_reads_parts_gets_parts() -> None:
    template = ChatTemplate(PARTS)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert template.render(messages) == "<system>be kind<user>hi<assistant>"
    several = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(several) == "<user>a\nb<assistant>"
    answer = [*messages, {"role": "assistant", "content": "well"}]
    continued = template.render(answer, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<system>be kind<user>hi<assistant>well"
    assert template.render([{"role": "assistant", "content": None}]) == "<assistant><assistant>"
    template.try_out()
