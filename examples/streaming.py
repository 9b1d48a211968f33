"""Print an answer as it is generated, and its usage at the end."""

from __future__ import annotations

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="embedded",
    messages=[{"role": "user", "content": "Tell me a story about a cat."}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:  # the last chunk, which has no choices
        print(f"\n{chunk.usage.completion_tokens} tokens")
