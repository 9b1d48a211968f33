"""The clients that are tried, pinned, each in an environment of its own: what it runs and what its runs gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.clients.run.cells import CELLS

HERE = Path(__file__).parent
RESULTS, RECORDED = HERE / "results.json", HERE / "recorded"
ENVIRONMENTS = HERE.parents[1] / "out/clients"
"""Where environments are made, once for each list of pins."""

SCRIPTED = ("tools", "cancel")
"""Cells whose server is `tests.agent`; that of the others has the embedded model."""


@dataclass(frozen=True)
class Client:
    """A Python client. requires: what pip installs, the client itself first and with its version."""

    name: str
    requires: tuple[str, ...]

    @property
    def version(self) -> str:
        return self.requires[0].partition("==")[2]

    @property
    def script(self) -> Path:
        return HERE / f"run/with_{self.name.replace('-', '_')}.py"

    @cached_property
    def python(self) -> Path:
        """The environment's interpreter; the environment is made if it is not there with these pins."""
        folder = ENVIRONMENTS / self.name
        pins = folder / "pins.txt"
        if not pins.exists() or pins.read_text().split("\n") != [*self.requires]:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            install = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *self.requires]
            subprocess.run(install, check=True, timeout=1800)
            pins.write_text("\n".join(self.requires))
        return folder / "bin/python"

    def run(self, url: str) -> Iterator[tuple[str, str]]:
        """Each cell of the script, as soon as it has run, and its outcome."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_", "ANTHROPIC_"))}
        own = {"NO_PROXY": "*", "no_proxy": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        line = [str(self.python), str(self.script), url]
        with subprocess.Popen(line, env=kept | own, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for told in process.stdout:
                if told.startswith('{"cell"'):
                    found = json.loads(told)
                    yield found["cell"], found["outcome"]
        assert process.returncode == 0, self.name


def pinned() -> list[Client]:
    """Those of environments.json."""
    found = json.loads((HERE / "environments.json").read_text("utf-8"))
    return [Client(name, tuple(requires)) for name, requires in found.items()]


def results() -> dict[str, Any]:
    """The version and the cells of each client, as they were when it was last run."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return found


__all__ = ["CELLS", "RECORDED", "RESULTS", "SCRIPTED", "Client", "pinned", "results"]
