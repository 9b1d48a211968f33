"""A start finds its model once, whatever reads of it, and tells the processes that it starts where it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.assembly import place
from quire.assembly.place import for_child, located, of_parent
from quire.cli import late
from quire.config import Settings
from tests.vision import make

OPTIONS = {"dtype": "float32", "max_model_len": 128, "block_size": 8}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked for; the folder of an image model is always found."""
    make(tmp_path, "gemma3")
    names: list[str] = []

    def locate(name: str, **rest: object) -> Path:
        names.append(name)
        return tmp_path

    monkeypatch.setattr(place, "locate", locate)
    return names


def test_an_llm_looks_for_its_model_once(asked: list[str]) -> None:
    with LLM("owner/name", **OPTIONS) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert asked == ["owner/name"]


def test_the_process_of_an_engine_is_told_where_the_model_is(asked: list[str]) -> None:
    async def ask() -> None:
        async with AsyncLLM("owner/name", **OPTIONS) as llm:
            [out] = [one async for one in llm.generate("abc", SamplingParams(max_tokens=2), "1") if one.finished]
            assert out.outputs[0].token_ids

    asyncio.run(ask())  # the process would ask the hub, which has no such model
    assert asked == ["owner/name"]


def test_a_plan_looks_for_the_model_once(asked: list[str]) -> None:
    assert late.plan.main(["owner/name", "--memory", "1GiB"], standalone_mode=False) is None
    assert asked == ["owner/name"]


def test_settings_of_a_child_are_those_of_its_parent(asked: list[str], tmp_path: Path) -> None:
    settings = located(Settings.of(model="owner/name", block_size=8, api_key=("secret",)))
    child = of_parent(for_child(settings))
    assert (child.place, child.model, child.cache) == (tmp_path, settings.model, settings.cache)
    assert not child.server.api_key
    assert located(child) is child and asked == ["owner/name"]
    assert of_parent(for_child(Settings.of(block_size=8))).place is None
