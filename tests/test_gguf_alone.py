"""One GGUF file is a whole model: what it says is what the folder it was made of says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from quire.assembly.text import build_text
from quire.cli import main
from quire.config import Settings
from quire.weights.locate import embedded
from tests.gguf_files import write


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its vocabulary and its template, in a folder with nothing else."""
    held = json.loads((embedded() / "tokenizer.json").read_text())
    vocab = held["model"]["vocab"] | {token["content"]: token["id"] for token in held["added_tokens"]}
    special = {token["content"] for token in held["added_tokens"]}
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    config = json.loads((embedded() / "tokenizer_config.json").read_text())
    path = tmp_path_factory.mktemp("alone") / "model.gguf"
    facts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in held["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab["<|endoftext|>"],
        "tokenizer.ggml.eot_token_id": vocab["<|end|>"],
        "tokenizer.chat_template": config["chat_template"],
    }
    write(path, AutoModelForCausalLM.from_pretrained(embedded(), dtype=torch.float32), "F16", facts=facts)
    return path


def said(*words: str) -> str:
    result = CliRunner().invoke(main, [*words, "--temperature", "0", "--max-tokens", "40", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_answers_as_the_folder_does(alone: Path) -> None:
    prompt = "Once upon a time there was a cat who"
    wanted = said("generate", prompt)
    assert len(wanted) > 60
    assert said("generate", prompt, "--model", str(alone)) == wanted
    assert said("generate", prompt, "--model", str(alone.parent)) == wanted


def test_its_words_and_its_template_are_the_folders(alone: Path) -> None:
    ours, theirs = build_text(Settings.of(model=str(alone))), build_text(Settings.of())
    assert ours.template is not None and theirs.template is not None
    messages = [{"role": "user", "content": "Tell me of a dog.\n  Twice, 2 times!"}]
    prompt = theirs.template.render(messages)
    assert ours.template.render(messages) == prompt
    assert ours.tokenizer.encode(prompt) == theirs.tokenizer.encode(prompt)
    assert ours.tokenizer.eos == theirs.tokenizer.eos


def test_it_is_told_from_its_header(alone: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(alone)])
    assert result.exit_code == 0, result.output
    assert "F16" in result.stdout
    assert "4,096 entries, 5 of them special" in result.stdout
