"""Peers that Quire is measured beside: each a process of the Python that has it, stopped unless it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from quire.errors import InvalidConfig

HERE = Path(__file__).parent

FORMATS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "llama-cpp": ("bf16", "q8_0", "q4_k_m"),
        "openvino": ("bf16",),
        "transformers": ("bf16", "f32"),
    }
)
"""What each peer reads of the files that `checkpoints` writes."""

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"llama-cpp": "llama-cpp-python", "openvino": "openvino numpy", "transformers": "transformers torch"}
)

OWN = frozenset(("PYTHONPATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"))
"""Environment variables of this process alone: peers wait as long for their threads as they do by themselves."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {"vllm": "vllm has no wheel for CPUs (its CPU build is compiled by hand); measure it by `quire bench serve`"}
)
"""Peers that are asked for and cannot be measured."""


def check(peers: Sequence[str], format: str) -> None:
    """Raises InvalidConfig for a peer that is not known, or does not read the format."""
    for name in peers:
        if name in REFUSED:
            raise InvalidConfig(f"--vs {name}: {REFUSED[name]}")
        if name not in FORMATS:
            raise InvalidConfig(f"--vs {name} is not known: use some of {','.join(FORMATS)}")
        if format not in FORMATS[name]:
            raise InvalidConfig(f"--vs {name} does not run --format {format}: it runs {', '.join(FORMATS[name])}")


class Peer:
    """A peer's process. python: the interpreter of its environment. clock: wall, or cpu for its processor time."""

    def __init__(
        self, name: str, python: str, model: Path, threads: int, sequences: int, context: int, clock: str = "wall"
    ) -> None:
        self.name, self.clock = name, clock
        file = HERE / f"{name.replace('-', '_')}.py"
        sizes = map(str, (threads, sequences, context))
        environment = {key: value for key, value in os.environ.items() if key not in OWN}
        self.process = subprocess.Popen(
            [python, str(HERE / "service.py"), str(file), str(model), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        reply = self._read()
        if "error" in reply:
            self.close()
            raise InvalidConfig(
                f"--vs {name}: {python} says {reply['error']}. Install it there (pip install {PACKAGES[name]}), or "
                f"name another Python with --peer-python {name}=PATH"
            )
        self.version = str(reply["version"])
        self._signal("SIGSTOP")

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """Seconds for greedy answers of `new` tokens."""
        return float(self.ask(prompts, new)[self.clock])

    def ask(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Seconds by `wall` and by `cpu`, and `tokens`. Raises RuntimeError where the peer fails."""
        self._signal("SIGCONT")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.process.stdin.flush()
        reply = self._read()
        self._signal("SIGSTOP")
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process."""
        self._signal("SIGCONT")
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self.process.wait()}"}
        return found

    def _signal(self, name: str) -> None:
        """A process that waits may still spin: it is stopped instead, where the system can."""
        if hasattr(signal, name) and self.process.poll() is None:
            self.process.send_signal(getattr(signal, name))


def pythons(named: Sequence[str]) -> dict[str, str]:
    """`PEER=PATH` words -> the interpreter of each peer; this one for others."""
    found = dict.fromkeys(FORMATS, sys.executable)
    for word in named:
        name, _, path = word.partition("=")
        if name not in FORMATS or not path:
            raise InvalidConfig(f"--peer-python {word}: use PEER=PATH, with a PEER of {', '.join(FORMATS)}")
        found[name] = path
    return found
