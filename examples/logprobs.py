"""How sure the model was: the probability of each token, and of those it might have chosen instead."""

from __future__ import annotations

import math

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(
    model="embedded",
    messages=[{"role": "user", "content": "Tell me a story about a fish."}],
    max_tokens=8,
    temperature=0,
    logprobs=True,
    top_logprobs=3,
)
for token in answer.choices[0].logprobs.content:
    others = ", ".join(f"{other.token!r} {math.exp(other.logprob):.2f}" for other in token.top_logprobs)
    print(f"{token.token!r:12} {math.exp(token.logprob):.2f}  of {others}")
