"""What each worker of pytest-xdist would do anew, or for nothing: compile the same files, free all at the end."""

from __future__ import annotations

import atexit
import compileall
import logging
import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import AssertionRewritingHook

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "training")


def files() -> list[Path]:
    """The modules that tests import from this repository."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def share(worker: str, workers: int) -> list[Path]:
    """What a worker, such as "gw1", compiles."""
    return files()[int(worker.removeprefix("gw")) :: workers]


def compile_file(path: Path, hook: AssertionRewritingHook) -> None:
    """As importing it does, where that has not been done. A file that is no Python fails when it is imported."""
    if not path.name.startswith("test_"):
        compileall.compile_file(path, quiet=2)
        return
    folder = rewrite.get_cache_dir(path)
    made = folder / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, made) is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            source, code = rewrite._rewrite_test(path, hook.config)
        except SyntaxError:
            return
        rewrite._write_pyc(hook.config.stash[rewrite.assertstate_key], code, source, made)


def compile_share(config: pytest.Config) -> None:
    """In a fresh clone all workers would compile each file, at the same time: each compiles its share first."""
    hook = next((each for each in sys.meta_path if isinstance(each, AssertionRewritingHook)), None)
    if hook is not None and not sys.dont_write_bytecode:
        for path in share(config.workerinput["workerid"], config.workerinput["workercount"]):  # type: ignore[attr-defined]
            compile_file(path, hook)


def cards_of(worker: str, cards: list[str]) -> list[str]:
    """The GPUs in the order in which a worker, such as "gw1", has them: workers begin with different ones, and what
    runs on the first two, or the first four, of them meets nothing that runs on some of these and some of others."""
    first = int(worker.removeprefix("gw")) % max(1, len(cards))
    return [card for _, card in sorted(enumerate(cards), key=lambda each: each[0] ^ first)]


def spread_workers(number: int) -> None:
    """Have this worker begin with another GPU of `number` than the next worker, before CUDA is initialised."""
    worker, given = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker is not None and number > 1:
        cards = given.split(",") if given else [str(card) for card in range(number)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards_of(worker, cards))


class Ending:
    """A worker ends as soon as all is done that is to be done at its end: an interpreter frees each object then, which
    takes five seconds after all tests are collected."""

    at_once = False

    @classmethod
    def end(cls) -> None:
        if cls.at_once:
            logging.shutdown()
            os._exit(0)


class CatchingLogs:
    """pytest's context of what is logged in one phase of a test, six of them a test, at the root logger and those of
    Quire's that may not propagate. Its own looks through all loggers for such: torch and transformers have hundreds."""

    OURS = ("uvicorn", "ray.serve")

    def __init__(self, handler: logging.Handler, level: int | None = None) -> None:
        self.handler, self.level = handler, level
        self.before = logging.root.level
        self.loggers: list[logging.Logger] = []

    def __enter__(self) -> logging.Handler:
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.before = logging.root.level
            logging.root.setLevel(min(self.before, self.level))
        self.loggers = [logging.root, *(ours for ours in map(logging.getLogger, self.OURS) if not ours.propagate)]
        for logger in self.loggers:
            logger.addHandler(self.handler)
        return self.handler

    def __exit__(self, *raised: object) -> None:
        if self.level is not None:
            logging.root.setLevel(self.before)
        for logger in self.loggers:
            logger.removeHandler(self.handler)


atexit.register(Ending.end)  # before others are registered, since the first is the last to be called
