"""Function calling: the model asks for a function, the program runs it and sends the result back."""

from __future__ import annotations

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


def weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "sunny", "celsius": 24})


functions = {"weather": weather}
tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "How is the weather in Rome?"}]
for tool_choice in ("required", "none"):  # a large model decides by itself: "auto"
    answer = client.chat.completions.create(
        model="embedded", messages=messages, tools=tools, tool_choice=tool_choice, max_tokens=80, temperature=0
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        result = functions[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print("called", call.function.name, call.function.arguments)
print("answer:", message.content)
