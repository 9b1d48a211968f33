"""Whatever a damaged folder says of itself, what comes of it is an answer or a clear refusal, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.text import build_text
from quire.cli.inspect import files, read_facts, shapes
from quire.config import Settings
from quire.errors import InvalidModel
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.tokenization.vocabulary import CHATML, byte_level, save

WRONG: tuple[Any, ...] = (None, "x", -1, 0, 1.5, True, [], [[1]], {"a": 1}, 10**30)


def places(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in value if isinstance(value, dict) else ():
        yield (*at, name)
        yield from places(value[name], (*at, name))


def damaged(path: Path) -> Iterator[str]:
    """Write the JSON file with each of its values wrong in turn, and tell which."""
    whole = path.read_text()
    for at in list(places(json.loads(whole))):
        for wrong in WRONG:
            held = json.loads(whole)
            inner = held
            for name in at[:-1]:
                inner = inner[name]
            inner[at[-1]] = wrong
            path.write_text(json.dumps(held))
            yield f"{path.name}: {'.'.join(at)} = {wrong!r}"
    path.write_text(whole)


def refusals(tell: Callable[[], None], path: Path) -> list[str]:
    """What `tell` says of each damage that it refuses. Any other error is a failure."""
    said = []
    for what in damaged(path):
        try:
            tell()
        except InvalidModel as error:
            said.append(str(error))
        except Exception as error:
            raise AssertionError(what) from error
    assert not [line for line in said if "\n" in line]
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, "llama-yarn")
    token = {str(byte_level().get_vocab_size()): {"content": "<x>", "special": True, "lstrip": False}}
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": CHATML, "added_tokens_decoder": token}
    generation = {"temperature": 0.5, "top_k": 4, "eos_token_id": [2], "max_new_tokens": 5}
    return save(tmp_path, byte_level(), tokenizer_config=config, generation_config=generation)


def test_a_config_of_nonsense_is_refused_in_one_line(folder: Path) -> None:
    settings = Settings.of(model=str(folder))

    def tell() -> None:
        looked = read_facts(settings)
        assert [*shapes(looked), *files(looked)]

    refused = refusals(tell, folder / "config.json")
    assert len(refused) > 50


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_tokenizer_or_defaults_of_nonsense_are_refused_in_one_line(folder: Path, name: str) -> None:
    settings = Settings.of(model=str(folder))

    def tell() -> None:
        assert build_text(settings).tokenizer.encode("the") != ()

    assert len(refusals(tell, folder / name)) > 10


def test_sizes_that_no_memory_holds_are_refused_in_one_line(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 1 << 23, "vocab_size": 1 << 24}))
    with pytest.raises(InvalidModel, match=r"there is no memory for .*: `quire plan` says what fits") as caught:
        load_model(folder, dtype="float16")
    assert "\n" not in str(caught.value)
