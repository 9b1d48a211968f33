"""Codex CLI and Claude Code, from the npm registry: how they are installed, told where the server is, and run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.agent import AS_JSON, JUST_SAY, ON_AND_ON, SAYS
from tests.clients.zoo import ENVIRONMENTS

VERSIONS = {"codex": ("@openai/codex", "0.169.0"), "claude": ("@anthropic-ai/claude-code", "2.1.331")}
CELLS = ("chat", "stream", "tools", "structured", "cancel")
NAMES = {"codex": "Codex CLI", "claude": "Claude Code"}

CODEX = """
model = "embedded"
model_provider = "quire"
[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
"""
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def installed(agent: str) -> Path:
    """Its program, of the version above."""
    package, version = VERSIONS[agent]
    folder = ENVIRONMENTS / agent
    wanted = {"private": True, "dependencies": {package: version}, "allowScripts": {package: True}}
    about = folder / "package.json"
    if not about.exists() or json.loads(about.read_text()) != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(wanted))
        subprocess.run(["npm", "install", "--prefix", str(folder)], check=True, capture_output=True, timeout=900)
    return folder / "node_modules/.bin" / agent


def begin(agent: str, url: str, work: Path, prompt: str, *more: str) -> subprocess.Popen[str]:
    """Run it in the folder `work` with one prompt."""
    home = work / ".home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CODEX.format(url=url))
    line = {
        "codex": ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *more, prompt],
        "claude": ["-p", prompt, "--allowedTools", "Bash", *more],
    }
    own = {"HOME": str(home), "CODEX_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*"}
    own |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "embedded"}
    own |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return subprocess.Popen(
        [str(installed(agent)), *line[agent]],
        cwd=work,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(agent: str, url: str, work: Path, prompt: str, *more: str) -> str:
    """What it says about one prompt."""
    with begin(agent, url, work, prompt, *more) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def chat(agent: str, url: str, work: Path) -> None:
    assert SAYS in run(agent, url, work, JUST_SAY)


def tools(agent: str, url: str, work: Path) -> None:
    """A loop of two tools, the second of which writes a file."""
    assert SAYS in run(agent, url, work, "Write a file")
    assert (work / "made.txt").read_text() == "written by a scripted model\n"


def structured(agent: str, url: str, work: Path) -> None:
    file = work / "schema.json"
    file.write_text(json.dumps(CITY))
    more = {
        "codex": ("--output-schema", str(file)),
        "claude": ("--json-schema", json.dumps(CITY), "--output-format", "json"),
    }
    said = run(agent, url, work, AS_JSON, *more[agent])
    if agent == "claude":
        assert json.loads(said.splitlines()[-1])["structured_output"] == {"city": "Rome"}, said
    else:
        assert json.loads(said.strip().splitlines()[-1]) == {"city": "Rome"}, said


def cancel(agent: str, url: str, work: Path, begun: Callable[[], object]) -> None:
    """begun: returns once the server answers."""
    with begin(agent, url, work, ON_AND_ON) as process:
        begun()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
