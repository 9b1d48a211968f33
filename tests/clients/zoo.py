"""The clients that are tried, pinned, each in an environment of its own: what it runs and what its runs gave."""

from __future__ import annotations

import json
import os
import shutil
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
    """A client in Python, or in JavaScript where its requirements have npm's form (`name@version`).

    requires: what pip or npm installs, the client itself first and with its version.
    """

    name: str
    requires: tuple[str, ...]

    @property
    def version(self) -> str:
        return self.requires[0].rpartition("@" if self.npm else "==")[2]

    @property
    def npm(self) -> bool:
        return "==" not in self.requires[0]

    @cached_property
    def environment(self) -> Path:
        """The folder that it is installed in, which is made if it is not there with these pins."""
        folder = ENVIRONMENTS / self.name.replace(" ", "-").lower()
        pins = folder / "pins.txt"
        if not pins.exists() or pins.read_text().split("\n") != [*self.requires]:
            install = ["npm", "install", "--silent", "--prefix", str(folder)]
            folder.mkdir(parents=True, exist_ok=True)
            if self.npm:
                allowed = {each.rpartition("@")[0]: True for each in self.requires}
                (folder / "package.json").write_text(json.dumps({"private": True, "allowScripts": allowed}))
            else:
                subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
                install = [str(folder / "bin/python"), "-m", "pip", "install", "-q"]
            subprocess.run([*install, *self.requires], check=True, timeout=1800)
            pins.write_text("\n".join(self.requires))
        return folder

    @cached_property
    def command(self) -> list[str]:
        """What runs the client's script."""
        folder, script = self.environment, f"with_{self.name.replace('-', '_')}"
        if not self.npm:
            return [str(folder / "bin/python"), str(HERE / f"run/{script}.py")]
        # Node looks for packages beside the script.
        for file in (HERE / "run").glob("*.mjs"):
            shutil.copy(file, folder)
        return ["node", str(folder / f"{script}.mjs")]

    def run(self, url: str) -> Iterator[tuple[str, str]]:
        """Each cell of the script, as soon as it has run, and its outcome."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_", "ANTHROPIC_"))}
        own = {"NO_PROXY": "*", "no_proxy": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen([*self.command, url], env=kept | own, stdout=subprocess.PIPE, text=True) as process:
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
