"""Programs that use a model as an agent: how they are installed, told where the server is, and run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.agent import AS_JSON, JUST_SAY, ON_AND_ON, SAYS
from tests.clients.zoo import Client

CODEX = """
model = "embedded"
model_provider = "quire"
[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
"""
CONTINUE = """
name: quire
version: 1.0.0
schema: v1
models:
  - {{name: embedded, provider: openai, model: embedded, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}}
"""
OPENCODE = {
    "provider": {
        "quire": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "quire",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"embedded": {"name": "embedded"}},
        }
    },
    "model": "quire/embedded",
    "small_model": "quire/embedded",
    "autoupdate": False,
    "permission": "allow",
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


ALL = ("chat", "stream", "tools", "structured", "cancel")


@dataclass(frozen=True)
class Agent(Client):
    """line: of a shell, with {prompt}; {url} is the server's there, in the contents of `files` by their paths in the
    work folder, and in `environ`. The work folder is HOME, too. cells: what it does."""

    line: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    cells: tuple[str, ...] = ("chat", "stream", "tools", "cancel")

    def start(self, url: str, work: Path, line: tuple[str, ...], prompt: str = "") -> subprocess.Popen[str]:
        """Run a line of its program in the folder `work`."""
        for name, text in self.files.items():
            (work / name).write_text(text.replace("{url}", url))
        own = {"HOME": str(work), "PWD": str(work), "NO_PROXY": "*", "no_proxy": "*", "CONTINUE_TELEMETRY_ENABLED": "0"}
        own |= {name: value.format(url=url, work=work) for name, value in self.environ.items()}
        words = [prompt if word == "{prompt}" else word.replace("{url}", url) for word in line]
        return subprocess.Popen(
            [str(self.environment / words[0]), *words[1:]],
            cwd=work,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def begin(self, url: str, work: Path, prompt: str, *more: str) -> subprocess.Popen[str]:
        """Ask it, after it was set up."""
        if self.setup:
            self.start(url, work, self.setup).communicate(timeout=100)
        return self.start(url, work, (*self.line, *more), prompt)

    def ask(self, url: str, work: Path, prompt: str, *more: str) -> str:
        """What it says about one prompt."""
        with self.begin(url, work, prompt, *more) as process:
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said


_OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_BASE": "{url}/v1"}
_CLINE = (
    "node_modules/.bin/cline",
    "auth",
    "-p",
    "openai-compatible",
    "-k",
    "none",
    "-m",
    "embedded",
    "-b",
    "{url}/v1",
)
AGENTS = (
    Agent(
        "Codex CLI",
        ("@openai/codex@0.169.0",),
        ("node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "{prompt}"),
        {"config.toml": CODEX.format(url="{url}")},
        {"CODEX_HOME": "{work}"},
        cells=ALL,
    ),
    Agent(
        "Claude Code",
        ("@anthropic-ai/claude-code@2.1.331",),
        ("node_modules/.bin/claude", "-p", "{prompt}", "--allowedTools", "Bash"),
        environ={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "embedded",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        cells=ALL,
    ),
    Agent(
        "opencode",
        ("opencode-ai@1.18.33",),
        ("node_modules/.bin/opencode", "run", "{prompt}"),
        {"opencode.json": json.dumps(OPENCODE)},
        # Its `run` goes on until the answer ends, whatever the signal.
        cells=("chat", "stream", "tools"),
    ),
    Agent(
        "Qwen Code",
        ("@qwen-code/qwen-code@0.24.4",),
        ("node_modules/.bin/qwen", "--auth-type", "openai", "--yolo", "-p", "{prompt}"),
        environ={**_OPENAI, "OPENAI_MODEL": "embedded"},
    ),
    Agent(
        "Cline CLI",
        ("cline@3.0.65",),
        ("node_modules/.bin/cline", "-P", "openai-compatible", "-m", "embedded", "-k", "none", "{prompt}"),
        # Otherwise a daemon may run the session, which goes on when the program is gone.
        environ={"CLINE_SESSION_BACKEND_MODE": "local"},
        setup=_CLINE,
    ),
    Agent(
        "Continue CLI",
        ("@continuedev/cli@1.5.47",),
        ("node_modules/.bin/cn", "--config", "config.yaml", "--auto", "-p", "{prompt}"),
        {"config.yaml": CONTINUE.format(url="{url}")},
    ),
    Agent(
        "gptme",
        ("gptme==0.35.1",),
        ("bin/gptme", "-n", "-m", "local/embedded", "--tool-format", "tool", "-t", "shell", "{prompt}"),
        environ=_OPENAI,
    ),
    Agent(
        "aider",
        ("aider-chat==0.86.2",),
        (
            *("bin/aider", "--model", "openai/embedded", "--no-git", "--yes-always", "--no-check-update"),
            *("--no-show-model-warnings", "--analytics-disable", "--message", "{prompt}"),
        ),
        environ={**_OPENAI, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cells=("chat", "stream"),
    ),
)


def chat(agent: Agent, url: str, work: Path) -> None:
    assert SAYS in agent.ask(url, work, JUST_SAY)


def tools(agent: Agent, url: str, work: Path) -> None:
    """A loop of two tools, the second of which writes a file."""
    assert SAYS in agent.ask(url, work, "Write a file")
    assert (work / "made.txt").read_text() == "written by a scripted model\n"


def structured(agent: Agent, url: str, work: Path) -> None:
    file = work / "schema.json"
    file.write_text(json.dumps(CITY))
    more = {
        "Codex CLI": ("--output-schema", str(file)),
        "Claude Code": ("--json-schema", json.dumps(CITY), "--output-format", "json"),
    }
    said = agent.ask(url, work, AS_JSON, *more[agent.name])
    if agent.name == "Claude Code":
        assert json.loads(said.splitlines()[-1])["structured_output"] == {"city": "Rome"}, said
    else:
        assert json.loads(said.strip().splitlines()[-1]) == {"city": "Rome"}, said


def cancel(agent: Agent, url: str, work: Path, begun: Callable[[], object]) -> None:
    """begun: returns once the server answers."""
    with agent.begin(url, work, ON_AND_ON) as process:
        begun()
        # As a terminal does: some run the agent in a process of its own.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)
