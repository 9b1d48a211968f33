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
from quire.weights.locate import embedded

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


def test_a_folder_that_is_named_for_its_tokenizer_is_not_asked_for_a_model(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((embedded() / name).read_bytes())
    for name in ("model-Q8_0.gguf", "model-Q4_K_M.gguf"):
        (tmp_path / name).write_bytes(b"a model")
    named, own = (build_text(Settings.of(tokenizer=one)) for one in (str(tmp_path), None))
    assert named.tokenizer.encode("A little dog.") == own.tokenizer.encode("A little dog.")
    assert named.info() == own.info()
