"""What the surface is tried under (look-ahead, executor, speculation), and what is started under such a setting."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

from quire import LLM
from quire.cli import main
from quire.config import Settings
from quire.weights.locate import embedded
from tests.forked import Popen, forking
from tests.live import ROOT, Live, environment, serving

CARD = torch.cuda.is_available()
LOOKAHEADS = (0, 1, 2)
EXECUTORS = ("local", "ahead", "grpc")
"""local: on the CPU. ahead: the executor of GPUs, on the card if there is one, else with interpreted kernels. grpc: a
host in this process, of the executor that `quire executor` has by default."""

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1})
DRAFTS = {"off": None, "ngram": NGRAM}
SIZES = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 160, "block_size": 16}
BATCH = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


class Setting(NamedTuple):
    lookahead: int
    executor: str
    drafts: str

    def __str__(self) -> str:
        return f"{self.executor}-{self.lookahead}-{self.drafts}"

    @property
    def device(self) -> str:
        return "cuda" if CARD and self.executor != "local" else "cpu"

    def theirs(self) -> dict[str, Any]:
        """The options of the process that runs the steps."""
        drafts = DRAFTS[self.drafts]
        options = SIZES | BATCH | {"lookahead": self.lookahead, "device": self.device}
        return options | ({"speculative_config": drafts} if drafts else {})


REFERENCE = Setting(0, "local", "off")
EVERY = tuple(Setting(*each) for each in itertools.product(LOOKAHEADS, EXECUTORS, DRAFTS))


def pairwise(turn: int, executors: Sequence[str] = EXECUTORS) -> list[Setting]:
    """Each executor once, with each look-ahead once: over three turns every pair of settings comes about."""
    return [
        Setting(LOOKAHEADS[(turn + at) % 3], executor, list(DRAFTS)[(turn + at // 2) % 2])
        for at, executor in enumerate(EXECUTORS)
        if executor in executors
    ]


class Deployment:
    """Everything a user may start, under one setting. It has one engine at a time: a host serves no other."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        self._host: Any = None
        self._llm: LLM | None = None
        self._server: Live | None = None
        self._open = contextlib.ExitStack()

    # ---------------------------------------------------------------- how settings are said

    def options(self) -> dict[str, Any]:
        """For `LLM` and `Settings.of`."""
        if self.setting.executor != "grpc":
            return self.setting.theirs()
        own = BATCH | {"executor": "grpc", "executor_address": f"127.0.0.1:{self._hosted()}"}
        drafts = DRAFTS[self.setting.drafts]
        return own | ({"speculative_config": drafts} if drafts else {})

    def environ(self, options: Mapping[str, Any] | None = None) -> dict[str, str]:
        """For commands: QUIRE_* variables."""
        options = self.options() if options is None else options
        return {f"QUIRE_{name.upper()}": str(value) for name, value in options.items()}

    @property
    def module(self) -> str:
        """What `python -m` runs for `quire`."""
        return "tests.surface.ahead" if self.interpreted else "quire"

    @property
    def interpreted(self) -> bool:
        return self.setting.executor == "ahead" and not CARD

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, engines of this process run their steps where the setting says, if their options ask for it."""
        with contextlib.ExitStack() as stack:
            if self.interpreted:
                from tests.surface.ahead import installed

                stack.enter_context(installed())
            stack.enter_context(forking())
            yield

    @contextlib.contextmanager
    def assumed(self) -> Iterator[None]:
        """Inside, settings have the setting's options for defaults: for code that sets few options, or none."""
        options, build = self.options(), Settings.build

        def with_ours(given: Mapping[str, tuple[object, str]]) -> Settings:
            return build({**{name: (value, "the surface") for name, value in options.items()}, **given})

        with self.here(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Settings, "build", with_ours)
            yield

    def _hosted(self) -> int:
        if self._host is None:
            from quire.assembly.grpc import host

            self._host = host(Settings.of(**self.setting.theirs()), "127.0.0.1:0")
        port: int = self._host.port
        return port

    # ---------------------------------------------------------------- what users start

    @property
    def llm(self) -> LLM:
        """Kept from one caller to the next."""
        if self._llm is None:
            self.rest()
            with self.here():
                self._llm = LLM(**self.options())
        return self._llm

    @property
    def server(self) -> Live:
        """`quire serve`, kept; it samples greedily unless asked otherwise."""
        if self._server is None:
            self.rest()
            folder = self.folder / "server"
            folder.mkdir(exist_ok=True)
            flags = ["--served-model-name", "embedded", "--batch-dir", str(folder / "batches")]
            environ = self.environ() | {"QUIRE_MODEL": str(self.greedy())}
            self._server = self._open.enter_context(serving(folder, *flags, module=self.module, environ=environ))
        return self._server

    def greedy(self) -> Path:
        """The embedded model, whose recommendation is the likeliest token."""
        folder = self.folder / "greedy"
        if not folder.exists():
            shutil.copytree(embedded(), folder)
            (folder / "generation_config.json").write_text('{"eos_token_id": [0, 4], "temperature": 0}')
        return folder

    def quire(self, *arguments: object, input: str | None = None, codes: tuple[int, ...] = (0,)) -> str:
        """`quire ARGUMENTS` in this process, with the settings in its environment: what it prints."""
        self.rest()
        with self.here():
            runner = CliRunner(env={"COLUMNS": "200"} | self.environ())
            done = runner.invoke(main, [str(one) for one in arguments], input=input)
        assert done.exit_code in codes, (arguments, done.output, done.exception)
        return done.stdout

    @contextlib.contextmanager
    def process(self, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """`quire ARGUMENTS` in one of its own, ended by SIGTERM; its exit code has to be 0."""
        self.rest()
        argv = [sys.executable, "-m", self.module, *map(str, arguments)]
        process = Popen(argv, cwd=ROOT, env=environment() | self.environ(), stdout=subprocess.PIPE, text=True)
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 0
        finally:
            process.kill()
            process.communicate()

    def rest(self) -> None:
        """End what was started, but for the host."""
        llm, self._llm, self._server = self._llm, None, None
        if llm is not None:
            llm.close()
        self._open.close()

    def close(self) -> None:
        self.rest()
        if self._host is not None:
            self._host.stop()
            self._host.executor.close()


class Deployments:
    """The deployment under the setting that is tried now, and the one whose answers count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deployments: dict[Setting, Deployment] = {}

    def at(self, setting: Setting) -> Deployment:
        """What was tried before is closed, but for the reference, which is asked beside each."""
        if setting != REFERENCE:
            for other in [each for each in self.deployments if each not in (setting, REFERENCE)]:
                self.deployments.pop(other).close()
        if setting not in self.deployments:
            folder = self.folder / str(setting)
            folder.mkdir(exist_ok=True)
            self.deployments[setting] = Deployment(setting, folder)
        return self.deployments[setting]

    def close(self) -> None:
        for deployment in self.deployments.values():
            deployment.close()
