"""A conversation of two turns: the server keeps no state, so each request carries the turns before it."""

from __future__ import annotations

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = [{"role": "system", "content": "You tell short stories."}]
for question in ("Tell me a story about a dog.", "What did the dog do then?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="embedded", messages=messages, max_tokens=40, temperature=0)
    text = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    print("user:", question)
    print("assistant:", text)
    print("prompt tokens:", answer.usage.prompt_tokens, "answer tokens:", answer.usage.completion_tokens)
