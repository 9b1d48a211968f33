"""Errors for folders that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.text import build_text
from quire.config import Settings
from quire.errors import InvalidModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "config.json",
            {"architectures": ["MPNetModel"], "model_type": "bert"},
            "architecture 'MPNetModel' is not supp",
        ),
        ("config.json", {"architectures": 5}, "architectures must be a list"),
        ("config.json", [], "config.json must hold a JSON object"),
        ("adapter_config.json", {"peft_type": "LORA"}, "is a LoRA adapter"),
        ("config.json", LLAMA, "no tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_model_itself_is_said_before_what_its_tokenizer_lacks(
    tmp_path: Path, file: str, content: Mapping[str, Any] | list[Any], says: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match=says):
        build_text(Settings.of(model=str(tmp_path)))


def test_other_executors_know_other_architectures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MPNetModel"]}))
    with pytest.raises(InvalidModel, match=r"no tokenizer\.json"):
        build_text(Settings.of(model=str(tmp_path), executor="hf"))


def test_the_tokenizer_is_described_with_the_template_that_is_used(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    own, given = (build_text(Settings.of(chat_template=one)).info() for one in (None, str(template)))
    assert given["chat_template"] == template.read_text() != own["chat_template"]
    assert own.items() - given.items() == {("chat_template", own["chat_template"])} and own["eos_token"]
