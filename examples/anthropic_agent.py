"""An agent through Anthropic's Messages API: tools are run until the model answers in words."""

from __future__ import annotations

from anthropic import Anthropic

client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
files = {"notes.txt": "Feed the cat at noon.", "todo.txt": "Buy a red ball."}
tools = [
    {
        "name": "read_file",
        "description": "Read a file.",
        "input_schema": {"type": "object", "properties": {"name": {"enum": list(files)}}, "required": ["name"]},
    }
]
messages = [{"role": "user", "content": "What do my notes say?"}]
tool_choice = {"type": "any", "disable_parallel_tool_use": True}  # a large model decides by itself: "auto"
while True:
    answer = client.messages.create(
        model="embedded", max_tokens=80, messages=messages, tools=tools, tool_choice=tool_choice
    )
    messages.append({"role": "assistant", "content": answer.content})
    results = []
    for block in answer.content:
        if block.type == "text":
            print("answer:", block.text)
        elif block.type == "tool_use":
            print("called", block.name, block.input)
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": files[block.input["name"]]})
    if not results:
        break
    messages.append({"role": "user", "content": results})
    tool_choice = {"type": "none"}
