"""Well-behaved clients: their answers must not depend on other clients."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from tests.contract.wire import ask

ANIMALS = ("dog", "cat", "bird", "fox")
_VARIES = re.compile(rb'"(?:id":"[a-z]+-[0-9a-f]+|created":\d+)|: keep-alive\n\n')


def normal(i: int, tokens: int = 64) -> tuple[str, dict[str, Any]]:
    """Path and body of stream `i`: both endpoints, greedy and seeded."""
    sampling = {"temperature": 0} if i % 4 < 2 else {"seed": i, "temperature": 0.8}
    ask = {"model": "embedded", "max_tokens": tokens, "ignore_eos": True, "stream": True, **sampling}
    about = f"a {ANIMALS[i % 4]} and {i} boats"
    if i % 2:
        return "/v1/chat/completions", ask | {
            "messages": [{"role": "user", "content": f"Tell me a story about {about}."}]
        }
    return "/v1/completions", ask | {"prompt": f"Once upon a time there was {about}"}


async def hear(port: int, i: int, tokens: int = 64) -> bytes:
    """The whole of stream `i`, without what differs from answer to answer by definition."""
    path, body = normal(i, tokens)
    answer = await ask(port, "POST", path, body, seconds=1200)
    assert answer.status == 200, answer
    return _VARIES.sub(b"", answer.body)


async def hear_all(port: int, count: int = 32, tokens: int = 64) -> list[bytes]:
    return await asyncio.gather(*(hear(port, i, tokens) for i in range(count)))
