"""Documents, files of text, search results and refusals within requests: what a model reads of them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.server.doubles import TOKENIZER, served

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
CALL: Any = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def file(text: str | bytes, media: str = "text/plain") -> str:
    data = text if isinstance(text, bytes) else text.encode()
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def document(**source: Any) -> Any:
    return {"type": "document", "source": source}


PLAIN = document(type="text", media_type="text/plain", data="a dog")
FOUND = {"type": "search_result", "source": "http://x", "title": "Dogs", "content": [{"type": "text", "text": "a dog"}]}
READ: list[tuple[str, str, Any, str]] = [
    (CHAT, "assistant", [{"type": "refusal", "refusal": "no dog"}], "no dog"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": file("a dog")}}], "a dog"),
    (CHAT, "user", [{"type": "file", "file": {"filename": "b.txt", "file_data": file("é")}}], "b.txt\n\né"),
    (RESPONSES, "assistant", [{"type": "refusal", "refusal": "no dog"}], "no dog"),
    (
        RESPONSES,
        "user",
        [{"type": "input_file", "filename": "b", "file_data": file("{}", "application/json")}],
        "b\n\n{}",
    ),
    (RESPONSES, "user", [{"type": "input_file", "file_data": file(b"\xef\xbb\xbfa", "text/csv;charset=utf-8")}], "a"),
    (MESSAGES, "user", [PLAIN, {"type": "text", "text": "and?"}], "a dog\nand?"),
    (MESSAGES, "user", [PLAIN | {"title": "T", "context": "C", "citations": {"enabled": False}}], "T\nC\n\na dog"),
    (MESSAGES, "user", [document(type="content", content="a dog")], "a dog"),
    (MESSAGES, "user", [document(type="content", content=[{"type": "text", "text": t} for t in "ab"])], "a\nb"),
    (MESSAGES, "user", [FOUND], "Dogs\nhttp://x\n\na dog"),
]
REFUSED: list[tuple[str, str, Any, str]] = [
    (CHAT, "user", [{"type": "file", "file": {"file_id": "file-1"}}], "file.file_id: only text is read"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": file("%PDF", "application/pdf")}}], "file_data: only text"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": "YQ=="}}], "file_data: only text"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": "data:text/plain,a"}}], "must be base64"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": file(b"\xff")}}], "no UTF-8 text"),
    (CHAT, "user", [{"type": "file", "file": {"file_data": "data:text/plain;base64,?"}}], "no UTF-8 text"),
    (CHAT, "user", [{"type": "file"}], "file.file_data must be text"),
    (CHAT, "assistant", [{"type": "refusal"}], "refusal must be text"),
    (RESPONSES, "user", [{"type": "input_file", "file_url": "http://x"}], "file_url: only text is read"),
    (MESSAGES, "user", [document(type="base64", media_type="application/pdf", data="YQ==")], "source of type text"),
    (MESSAGES, "user", [document(type="content", content=[{"type": "image"}])], "a list of text blocks"),
    (MESSAGES, "user", [PLAIN | {"citations": {"enabled": True}}], "cite no sources"),
    (MESSAGES, "user", [PLAIN | {"title": 1}], "are text"),
    (MESSAGES, "assistant", [PLAIN], "a block of type 'document' is not supported"),
]


def request(path: str, role: str, content: Any) -> dict[str, Any]:
    talk = [{"role": role, "content": content}, {"role": "user", "content": "hi"}]
    return {"model": "tiny", "input" if path == RESPONSES else "messages": talk, "max_tokens": 8} | (
        {"max_tokens": None, "max_output_tokens": 8} if path == RESPONSES else {}
    )


@pytest.mark.parametrize(("path", "role", "content", "text"), READ)
async def test_the_text_of_a_document_is_read(path: str, role: str, content: Any, text: str) -> None:
    async with served(template=TEMPLATE, room=512) as server:
        answer = await server.post(path, **request(path, role, content))
        assert answer.status_code == 200, answer.text
        assert TOKENIZER.decode(server.port.submitted[-1].prompt) == f"{role}:{text};user:hi;"


@pytest.mark.parametrize(("path", "role", "content", "said"), REFUSED)
async def test_what_is_no_text_is_refused_with_what_to_send(path: str, role: str, content: Any, said: str) -> None:
    async with served(template=TEMPLATE, room=512) as server:
        answer = await server.post(path, **request(path, role, content))
        assert (answer.status_code, server.port.submitted) == (400, [])
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("refused", [{"refusal": "no dog"}, {"content": None, "refusal": "no dog"}])
async def test_a_refusal_that_openais_client_sends_back_is_what_the_assistant_said(refused: Any) -> None:
    async with served(template=TEMPLATE, room=512) as server:
        talk = [{"role": "assistant", **refused}, {"role": "user", "content": "hi"}]
        await server.chat(messages=talk)
        assert TOKENIZER.decode(server.port.submitted[-1].prompt) == "assistant:no dog;user:hi;"
        answer = await server.post(CHAT, model="tiny", messages=[{"role": "user", "content": "x", "refusal": "no"}])
        assert answer.status_code == 400


async def test_results_of_tools_may_be_documents_and_names_of_tools() -> None:
    found = [FOUND, PLAIN, {"type": "tool_reference", "tool_name": "f"}]
    async with served(template=TEMPLATE, room=512) as server:
        talk = [
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
        ]
        answer = await server.post(MESSAGES, model="tiny", messages=talk, max_tokens=8)
        assert answer.status_code == 200, answer.text
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert "Dogs\nhttp://x\n\na dog\na dog\nf\n" in said


async def test_thoughts_of_several_items_are_kept_and_those_without_text_make_no_message() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"

    def thought(text: str) -> Any:
        return {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}] if text else None,
        }

    said = {"type": "message", "role": "assistant", "content": "Look"}
    for items, shown in (
        (
            [thought("a"), said, thought("b"), {"role": "user", "content": "hi"}],
            "user:|hi;assistant:a\nb|Look;user:|hi;",
        ),
        ([thought(""), said, {"role": "user", "content": "hi"}], "user:|hi;assistant:|Look;user:|hi;"),
        ([thought("a"), thought("b"), said], "user:|hi;assistant:a\nb|Look;"),
    ):
        async with served(template=template, room=512) as server:
            answer = await server.post(RESPONSES, model="tiny", input=[{"role": "user", "content": "hi"}, *items])
            assert answer.status_code == 200, answer.text
            assert TOKENIZER.decode(server.port.submitted[-1].prompt) == shown
