"""Many requests as one file, answered in the background: start the server with `quire serve --batch-dir batches`."""

from __future__ import annotations

import json
import time

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
lines = [
    {
        "custom_id": f"story-{animal}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "embedded",
            "messages": [{"role": "user", "content": f"Tell me a story about a {animal}."}],
            "max_tokens": 20,
        },
    }
    for animal in ("dog", "cat", "bird")
]
text = "".join(json.dumps(line) + "\n" for line in lines)
file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
print(batch.status, f"{batch.request_counts.completed} of {batch.request_counts.total}")
for row in map(json.loads, client.files.content(batch.output_file_id).text.splitlines()):
    print(row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"])
