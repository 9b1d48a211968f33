"""The user's surface under other settings than a CPU's: every command, every method of `LLM` and `AsyncLLM`, every
block of the docs.

What a user can do is listed (`methods`, `commands`, `blocks`); what it is done under is a look-ahead (0, 1, 2), an
executor (on the CPU; the one of GPUs that is run ahead of, its kernels interpreted; one behind gRPC) and speculation
(off, by look-up). Each item has to answer as it does on the CPU, without look-ahead and drafts, to the last token.

- CI: each item with each executor, each look-ahead and speculation on and off; all pairs of these over all items. What
  takes long is done with fewer executors, or at night only (`Item.ci`).
- `pytest -m "nightly and not gpu" tests/surface`: everything with everything.
- `pytest -m "gpu and not nightly" tests/surface`: CI's selection with a card in place of the interpreter, and what
  needs a card besides; `-m gpu`: everything with everything. It needs the packages that Quire imports, pytest, httpx
  and transformers; what else an item needs is said where it is skipped.

A command, a method or a block that is not listed fails `test_everything_is_listed`: add an `Item` that does it as a
user would, or, where no engine takes part, a `Named` with the test that holds it.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM
from quire.cli import main
from tests.commands import commands
from tests.live import ROOT
from tests.surface.blocks import BLOCKS, NAMED, blocks
from tests.surface.commands import COMMANDS
from tests.surface.deployment import CARD, EVERY, EXECUTORS, REFERENCE, Deployments, Setting, pairwise
from tests.surface.items import Item
from tests.surface.methods import METHODS

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # hashes wrap around in the interpreter, as they do on a card
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
]

ITEMS = sorted((*METHODS, *COMMANDS, *BLOCKS), key=lambda item: item.part)


def chosen(at: int, item: Item, *, card: bool = False) -> list[Setting]:
    """What it is tried under by day."""
    if not item.executors:
        return [REFERENCE] if card or not (item.ci == () or item.elsewhere or item.card) else []
    turn = 0 if item.part == "server" else at  # one turn is few servers
    return pairwise(turn, item.executors if item.ci is None or (card and not item.ci) else item.ci)


def rows(*, card: bool) -> Iterator[Any]:
    for at, item in enumerate(ITEMS):
        often = chosen(at, item, card=card)
        for setting in [each for each in EVERY if each.executor in item.executors] or [REFERENCE]:
            marks = [pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="needs a CUDA device")] if card else []
            if setting not in often:
                marks.append(pytest.mark.nightly)
            if card or not item.card:
                yield pytest.param(setting, item, marks=marks, id=f"{setting}-{item.name}")


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployments]:
    opened = Deployments(tmp_path_factory.mktemp("surface"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What the reference answered, by item."""
    return {}


def tried(deployments: Deployments, known: dict[str, Any], setting: Setting, item: Item) -> None:
    for package in (*item.needs, *(("grpc",) if setting.executor == "grpc" else ())):
        reason = f"{item.name} needs {package}, which is not installed, or too old"
        pytest.importorskip(package, reason=reason, exc_type=ImportError)
    if setting != REFERENCE and item.name not in known:
        known[item.name] = item.run(deployments.at(REFERENCE))
    answer = item.run(deployments.at(setting))
    assert answer == known.setdefault(item.name, answer)


@pytest.mark.skipif(CARD, reason="there is a card: pytest -m gpu")
@pytest.mark.parametrize(
    ("setting", "item"), sorted(rows(card=False), key=lambda row: (str(row.values[0]), row.values[1].part))
)
def test_the_surface_answers_alike_under_every_setting(
    deployments: Deployments, known: dict[str, Any], setting: Setting, item: Item
) -> None:
    tried(deployments, known, setting, item)


@pytest.mark.parametrize(
    ("setting", "item"), sorted(rows(card=True), key=lambda row: (str(row.values[0]), row.values[1].part))
)
def test_the_surface_answers_alike_on_a_card(
    deployments: Deployments, known: dict[str, Any], setting: Setting, item: Item
) -> None:
    tried(deployments, known, setting, item)


def test_everything_is_listed() -> None:
    listed = {name for item in ITEMS for name in item.name.split(", quire ")} | {each.name for each in NAMED}
    methods = [
        f"{kind.__name__}.{name}"
        for kind in (LLM, AsyncLLM)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    ]
    there = [*(path for path, _ in commands(main)), *methods, *(block.name for block in blocks())]
    assert len(there) == len(set(there)) > 60
    assert [name for name in there if name not in listed and name.removeprefix("quire ") not in listed] == []
    assert [each.name for each in NAMED if each.name not in there] == []


def test_what_is_done_elsewhere_is_done_there() -> None:
    for place in {item.elsewhere for item in ITEMS if item.elsewhere} | {each.elsewhere for each in NAMED}:
        path, _, name = place.partition("::")
        assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / path).read_text("utf-8"), re.MULTILINE), place


def test_every_pair_of_settings_comes_about_in_ci() -> None:
    seen = {
        setting
        for at, item in enumerate(ITEMS)
        if item.executors == EXECUTORS and item.ci is None
        for setting in chosen(at, item)
    }
    for a, b in itertools.combinations(range(3), 2):
        assert {(s[a], s[b]) for s in seen} == {(s[a], s[b]) for s in EVERY}, (a, b)
