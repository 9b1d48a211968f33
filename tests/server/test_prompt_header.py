"""`--prompt-header`: a line that changes with every request no longer keeps a conversation from its cached prefix."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import unquote

import pytest

from quire.server.limits import Limits
from quire.tokenization.prompt_header import PromptHeader
from tests.server.doubles import TOKENIZER, served
from tests.server.engine_port import EnginePort

pytestmark = pytest.mark.anyio

HEADER = "x-anthropic-billing-header: cc_version=2.1.{0}; cch={0:05x};"
LIMITS = Limits(prompt_header=PromptHeader("x-anthropic-billing-header: .*"))
WORDS = ("read", "the", "file", "and", "tell", "me", "what", "it", "does", "then", "run", "tests")
RULES = " ".join(random.Random(1).choices(WORDS, k=700))
TURNS = 40


def agent_request(turn: int, talk: list[dict[str, Any]]) -> dict[str, Any]:
    """What Claude Code sends: the header is a block of its own, before the system prompt."""
    blocks = [{"type": "text", "text": HEADER.format(7919 * turn)}, {"type": "text", "text": RULES}]
    return {"system": blocks, "messages": talk, "max_tokens": 4, "seed": 5}


async def session(limits: Limits | None, **engine: Any) -> tuple[list[dict[str, Any]], EnginePort]:
    """The answers of a session, each of whose requests repeats the conversation behind another header."""
    port, draw = EnginePort(pages=8000, max_num_batched_tokens=512, max_chunk_tokens=300, **engine), random.Random(2)
    talk: list[dict[str, Any]] = []
    answers = []
    async with served(limits=limits, port=port, room=40_000) as server:
        for turn in range(TURNS):
            talk.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=12))})
            response = await server.post("/v1/messages", **agent_request(turn, talk), return_cache_details=True)
            assert response.status_code == 200, response.text
            answers.append(response.json() | {"said": response.headers.get("x-quire-prompt-header")})
            talk.append({"role": "assistant", "content": f"answer {turn}"})
        port.metrics_text = (await server.client.get("/metrics")).text  # type: ignore[attr-defined]
    return answers, port


@pytest.mark.parametrize("lookahead", [0, 2])
async def test_with_the_pattern_nearly_all_tokens_behind_the_header_come_from_the_cache(lookahead: int) -> None:
    answers, port = await session(LIMITS, lookahead=lookahead)
    asked = sum(len(request.prompt) for request in port.submitted)
    read = sum(answer["usage"]["cache_read_input_tokens"] for answer in answers)
    assert asked > 50_000 and read >= 0.95 * asked, read / asked
    for turn, answer in enumerate(answers):
        header = HEADER.format(7919 * turn)
        assert unquote(answer["said"]) == f"removed={header}"
        assert answer["usage"]["removed_characters"] == len(header)
        assert "billing" not in TOKENIZER.decode(port.submitted[turn].prompt)
    metrics = port.metrics_text  # type: ignore[attr-defined]
    assert f'quire:prompt_headers_total{{engine="0",model_name="tiny",outcome="removed"}} {TURNS}.0' in metrics
    assert "billing" not in metrics


@pytest.mark.parametrize("lookahead", [0, 2])
async def test_without_it_answers_are_those_of_a_cold_cache_and_the_first_differing_token_is_named(
    lookahead: int,
) -> None:
    answers, port = await session(None, lookahead=lookahead)
    cold, _ = await session(None, lookahead=lookahead, caching=False)
    assert [answer["content"] for answer in answers] == [answer["content"] for answer in cold]
    assert all(answer["said"] is None for answer in answers)
    assert sum(answer["usage"]["cache_read_input_tokens"] for answer in answers) < 2000
    for turn in range(1, TURNS):
        prompt = port.submitted[turn].prompt
        before = [request.prompt for request in port.submitted[:turn]]
        differs = max(next(i for i, (a, b) in enumerate(zip(prompt, old, strict=False)) if a != b) for old in before)
        assert differs < len(TOKENIZER.encode("<|im_start|>system\n" + HEADER.format(7919 * turn)))
        usage, prefix = answers[turn]["usage"], port.explained(answers[turn]["id"])["prefix"]
        assert (usage["diverged_at"], prefix["diverged_at"]) == (differs, differs)
        hits = usage["cache_read_input_tokens"]
        assert f"the first {hits} tokens are in the cache" in prefix["why"]
        assert f"differs from token {differs} on" in prefix["why"]
    assert {answer["usage"]["diverged_at"] for answer in cold} == {None}


SHAPES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "{0}\nBe kind."}, {"role": "user", "content": "hi"}]
    },
    "/v1/messages": {"system": "{0}\nBe kind.", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"instructions": "{0}\nBe kind.", "input": "hi"},
    "/api/chat": {"messages": [{"role": "system", "content": "{0}\nBe kind."}, {"role": "user", "content": "hi"}]},
    "/api/generate": {"system": "{0}\nBe kind.", "prompt": "hi"},
}
PARTS = [{"type": "text", "text": "{0}"}, {"type": "text", "text": "Be kind."}]
JOINED = "<|im_start|>user\nBe kind.<|im_end|>\n<|im_start|>assistant\n"
LEFT = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def filled(value: Any, header: str) -> Any:
    """`value` with the header in its texts."""
    if isinstance(value, dict):
        return {name: filled(one, header) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one, header) for one in value]
    return value.replace("{0}", header) if isinstance(value, str) else value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SHAPES)
async def test_every_conversation_is_searched_and_its_answer_says_so(path: str, stream: bool) -> None:
    limits = {} if path.startswith("/api") else {"max_output_tokens" if "responses" in path else "max_tokens": 40}
    header = HEADER.format(3) + " é%"
    async with served(limits=LIMITS) as server:
        for given in (header, header + "\r"):
            made = await server.post(path, **filled(SHAPES[path], given), stream=stream, **limits)
            assert made.status_code == 200, made.text
            assert unquote(made.headers["x-quire-prompt-header"]) == f"removed={given}"
            assert TOKENIZER.decode(server.port.submitted[-1].prompt) == LEFT
        plain = await server.post(path, **filled(SHAPES[path], "Hello."), stream=stream, **limits)
        assert "x-quire-prompt-header" not in plain.headers
        assert TOKENIZER.decode(server.port.submitted[-1].prompt) == LEFT.replace("Be", "Hello.\nBe")


async def test_what_only_counts_tokens_counts_those_that_are_left() -> None:
    body = filled(SHAPES["/v1/messages"], HEADER.format(1))
    async with served(limits=LIMITS) as server:
        length = len(TOKENIZER.encode(LEFT, add_special_tokens=False))
        counted = await server.post("/v1/messages/count_tokens", **body)
        assert counted.json() == {"input_tokens": length}
        counted = await server.post("/v1/responses/input_tokens", **filled(SHAPES["/v1/responses"], HEADER.format(1)))
        assert counted.json()["input_tokens"] == length
        shown = await server.post("/tokenize", **filled(SHAPES["/v1/chat/completions"], HEADER.format(1)))
        assert shown.json()["count"] == length


async def test_parts_of_a_message_are_searched_one_by_one_and_prompts_that_are_no_conversation_are_not() -> None:
    header = HEADER.format(1)
    async with served(limits=LIMITS, room=256) as server:
        await server.chat(messages=[{"role": "user", "content": filled(PARTS, header)}], max_tokens=8)
        assert TOKENIZER.decode(server.port.submitted[-1].prompt) == JOINED
        made = await server.post("/v1/completions", prompt=header + "\nhi", max_tokens=8)
        assert "x-quire-prompt-header" not in made.headers
        assert TOKENIZER.decode(server.port.submitted[-1].prompt) == header + "\nhi"


@pytest.mark.parametrize(
    ("content", "outcome"), [("hello there", "whole"), (("word " * 50 + "\n") * 9 + "end", "too_long")]
)
async def test_a_pattern_that_matches_everything_takes_nothing_out_and_says_so(content: str, outcome: str) -> None:
    async with served(limits=Limits(prompt_header=PromptHeader(".+")), room=2048) as server:
        made = await server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=8)
        assert made.headers["x-quire-prompt-header"] == f"kept={outcome}"
        assert "removed_characters" not in made.json()["usage"]["prompt_tokens_details"]
        assert content in TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert f'outcome="{outcome}"}} 1.0' in (await server.client.get("/metrics")).text
