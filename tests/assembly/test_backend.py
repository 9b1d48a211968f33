"""What the native backend says of its model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.assembly.backend import build_backend, model_names
from quire.assembly.text import Text
from quire.config import Settings
from quire.weights.pooling import GENERATES


def text(infill: Any) -> Text:
    tokenizer = cast(Any, SimpleNamespace(infill=infill, has_text=True, eos=frozenset({1})))
    return Text(Path("folder"), tokenizer, None, {"top_k": 5}, "hermes", "qwen3", "the template", GENERATES)


@pytest.mark.parametrize(
    ("given", "names"), [({}, ("embedded",)), ({"served_model_name": ("a", "b", "a")}, ("a", "b"))], ids=["none", "two"]
)
def test_a_model_has_the_names_that_it_is_given(given: dict[str, Any], names: tuple[str, ...]) -> None:
    settings = Settings.of(**given)
    card = build_backend(settings, text(None), cast(Any, None)).card
    assert card.names == names and model_names(settings)[0] == names[0]
    assert (card.root, card.defaults, card.infill_ends) == ("embedded", {"top_k": 5}, ())
    assert (card.tool_parser, card.reasoning_parser) == ("hermes", "qwen3")


def test_answers_before_a_suffix_end_where_the_tokenizer_says() -> None:
    card = build_backend(Settings.of(), text(SimpleNamespace(ends=(7, 9))), cast(Any, None)).card
    assert card.infill_ends == (7, 9)
