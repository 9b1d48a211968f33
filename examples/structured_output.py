"""An answer that is JSON of a schema."""

from __future__ import annotations

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "colour": {"enum": ["brown", "black", "white"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="embedded",
    messages=[{"role": "user", "content": "Tell me about a dog."}],
    response_format={"type": "json_schema", "json_schema": {"name": "dog", "schema": schema}},
    max_tokens=80,
    temperature=0,
)
assert answer.choices[0].finish_reason == "stop"  # "length" would mean that the JSON is cut off
print(json.loads(answer.choices[0].message.content))
