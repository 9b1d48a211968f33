"""EleutherAI's evaluation harness: generated answers of a task in a file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import MODEL, main

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
WORDS = "generation_kwargs: {until: ['\\n'], max_gen_toks: 20}\nmetric_list: [{metric: exact_match}]"
ROWS = [{"question": "The fish swam under the", "answer": " boat"}, {"question": "Woof, said the", "answer": " dog"}]


def evaluate(url: str, model: str, path: str, kind: str, more: str, *args: str) -> None:
    folder = Path(tempfile.mkdtemp())
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    (folder / "task.yaml").write_text(TASK.format(name="boats", data=data, kind=kind, more=more))
    about = f"model={MODEL},base_url={url}{path},tokenizer_backend=None,tokenized_requests=False,num_concurrent=2"
    line = [str(Path(sys.executable).parent / "lm_eval"), "--model", model, "--model_args", about]
    line += ["--include_path", str(folder), "--tasks", "boats", "--output_path", str(folder / "out"), *args]
    made = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    [found] = (folder / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["boats"]


def chat(url: str) -> None:
    evaluate(url, "local-chat-completions", "/v1/chat/completions", "generate_until", WORDS, "--apply_chat_template")
    evaluate(url, "local-completions", "/v1/completions", "generate_until", WORDS)


main(chat)
