"""Simon Willison's `llm`: its command, as people use it, with models of a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cells import ASK, BOAT, MODEL, ON_AND_ON, SAYS, main
from people import PROMPTS, Person

FUNCTION = 'def weather(city: str) -> str:\n    "Tells the weather of a city."\n    return f"It is sunny in {city}."\n'


def command(url: str, *args: str) -> tuple[list[str], dict[str, str]]:
    folder = tempfile.mkdtemp()
    models = [{"model_id": "quire", "model_name": MODEL, "api_base": f"{url}/v1"}]
    models[0] |= {"supports_tools": True, "supports_schema": True}  # type: ignore[dict-item]
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))
    environ = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    return [str(Path(sys.executable).parent / "llm"), "-m", "quire", *args], environ


def run(url: str, *args: str) -> str:
    line, environ = command(url, *args)
    made = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def chat(url: str) -> None:
    assert run(url, "--no-stream", "-o", "max_tokens", "30", BOAT).strip()


def stream(url: str) -> None:
    assert run(url, "-o", "max_tokens", "30", BOAT).strip()


def tools(url: str) -> None:
    shown = run(url, "--functions", FUNCTION, "--td", ASK)
    assert SAYS in shown


def structured(url: str) -> None:
    schema = json.dumps(Person.model_json_schema())
    Person.model_validate_json(run(url, "-o", "temperature", "0", "--schema", schema, PROMPTS[0]))


def cancel(url: str) -> None:
    line, environ = command(url, ON_AND_ON)
    process = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    time.sleep(0)
    process.stdout.close()
    process.wait(100)


main(chat, stream, tools, structured, cancel)
