"""Settings of every test run."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of pytest-xdist would fight over the cores otherwise
# Several threads of one test wait for each other without taking the core from the other worker.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may depend on what another one has left in the user's folder of caches; models stay where they are.
os.environ.setdefault(
    "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "huggingface")
)
os.environ["XDG_CACHE_HOME"] = os.devnull
# Nor on where it is started: on the width of a terminal, or a proxy, which is not asked for this machine.
os.environ["COLUMNS"] = "80"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"

import _pytest.logging
import hypothesis
import pytest
import torch

from tests.forked import forking
from tests.parts import part_of
from tests.worker import CatchingLogs, Ending, compile_share, spread_workers

for option in [name for name in os.environ if name.startswith(("QUIRE_", "OPENAI_"))]:
    del os.environ[option]  # no options but those that a test gives
spread_workers(torch.cuda.device_count())
if not torch.cuda.is_available():  # chosen before any kernel is defined, whichever test module imports one first
    os.environ["TRITON_INTERPRET"] = "1"

gc.set_threshold(50_000)
gc.disable()  # until tests are collected: what that leaves would be scanned again and again

# An example that takes 200 ms, or examples that are made slowly, are no fault of a test on a busy machine. Every run
# has the same examples, but with `--hypothesis-profile anew`, as at night.
for profile, alike in {"alike": True, "anew": False}.items():
    hypothesis.settings.register_profile(
        profile, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=alike
    )
hypothesis.settings.load_profile("alike")

_pytest.logging.catching_logs = CatchingLogs  # type: ignore[misc,assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="a part of the selected tests: see tests/parts.py")


def pytest_configure(config: pytest.Config) -> None:
    try:
        part_of([], config.getoption("--part"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if hasattr(config, "workerinput"):
        Ending.at_once = True
        compile_share(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = part_of(items, config.getoption("--part"))
    config.hook.pytest_deselected(items=[*({*items} - {*chosen})])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from garbage collection: they stay, and scanning them takes half a second."""
    gc.enable()
    gc.freeze()
    if not Ending.at_once:
        atexit.register(gc.unfreeze)  # or libraries that look for leaks at the end find all of it


class Garbage:
    """Python counts objects, not their bytes: a model that waits for the collector is few of them, and gigabytes of
    models did. So garbage is collected whenever the process has grown by so many pages, of 4 KiB."""

    growth = 1 << 17
    limit = 0
    modules = 0

    @classmethod
    def pages(cls) -> int:
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) if statm.exists() else 0

    @classmethod
    def collect(cls) -> None:
        if cls.pages() > cls.limit:
            gc.collect()
            cls.limit = cls.pages() + cls.growth

    @classmethod
    def after_module(cls) -> None:
        """What modules and libraries keep for good is millions of objects: now and then they are excluded, too."""
        cls.modules += 1
        if cls.modules % 30 == 0:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers in every run, or one that fails once in a hundred runs would not be found."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
    """What several tests share draws the same numbers, and they do, whichever of them this worker runs first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(fixturedef.argname.encode()))
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            Garbage.after_module()


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Processes that the code under test starts in this one are forked (`tests.forked`)."""
    with forking():
        yield


def pytest_runtest_logfinish() -> None:
    Garbage.collect()
