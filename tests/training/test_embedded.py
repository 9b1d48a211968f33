"""The model that ships: its files, its sizes, and that it does what the model card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from training.data import Message
from training.evaluate import REQUEST, ask, bits_per_byte
from training.model import load_model
from training.requests import mentions
from training.tokenizer import SPECIAL_TOKENS, Codec, load_tokenizer

FOLDER = Path(__file__).parents[2] / "src/quire/weights/embedded"
STORY = (
    "Once upon a time, there was a little girl named Anna. She had a red kite. One day, the wind took the kite, and "
    'it flew up into a tall tree. Anna was sad. Her brother saw her and said, "Don\'t worry, I can help you." He '
    'climbed up the tree and got the kite. Anna was very happy. She said, "Thank you!" and they played all day.'
)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return load_tokenizer(FOLDER)


def test_sizes_are_within_their_limits() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000
    assert (FOLDER / "draft/model.safetensors").stat().st_size <= 1_000_000
    assert 5e6 <= load_model(FOLDER).parameter_count() <= 8e6


@pytest.mark.parametrize("name", [".", "draft"])
def test_it_is_a_llama_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 4096, (2, 50), generator=torch.Generator().manual_seed(1))
    theirs = transformers.LlamaForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
    assert next(iter(theirs.state_dict().values())).isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(load_model(FOLDER / name)(tokens), theirs(tokens).logits, atol=1e-3, rtol=1e-3)


def test_the_draft_reads_the_same_tokens() -> None:
    target, draft = (json.loads((FOLDER / name / "config.json").read_text()) for name in (".", "draft"))
    for shared in ("vocab_size", "eos_token_id", "bos_token_id", "max_position_embeddings", "head_dim"):
        assert target[shared] == draft[shared]
    assert not (FOLDER / "draft/tokenizer.json").exists()


def test_the_tokenizer_has_4096_tokens_with_the_special_ones_first(codec: Codec) -> None:
    assert codec.vocab_size == 4096
    assert [codec.id_of(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["eos_token_id"] == [codec.end_of_text, codec.end]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello, world!",
        "  two  spaces\t\r\n\n",
        "naïve Ünïcödé",
        "日本語 한국어 عربى",
        "🦆👩‍👩‍👧 \u200b\ufeff",
        "\x00\x01\x7f",
    ],
)
def test_text_comes_back_unchanged(codec: Codec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_every_code_point_has_tokens(codec: Codec) -> None:
    text = "".join(chr(code) for code in range(0, 0x110000, 97) if not 0xD800 <= code < 0xE000)
    assert codec.decode(codec.encode(text)) == text


def test_the_chat_template_renders_roles_in_order(codec: Codec) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [
        {"role": "system", "content": "Be kind. "},
        {"role": "user", "content": [{"type": "text", "text": "A dog?"}]},
        {"role": "assistant", "content": "Woof."},
        {"role": "user", "content": "More."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|system|>Be kind.<|end|><|user|>A dog?<|end|><|assistant|>Woof.<|end|><|user|>More.<|end|><|assistant|>"
    )
    assert tokenizer.apply_chat_template(messages[3:], tokenize=False) == "<|user|>More.<|end|>"
    assert tokenizer(rendered)["input_ids"] == codec.encode(rendered)
    asked = [Message(role="user", content="More.")]
    assert codec.prompt(asked) == codec.encode("<|user|>More.<|end|><|assistant|>")


def test_it_knows_how_a_story_goes(codec: Codec) -> None:
    assert bits_per_byte(load_model(FOLDER), codec, [STORY]) < 0.8
    assert bits_per_byte(load_model(FOLDER / "draft"), codec, [STORY]) < 1.1


def test_it_follows_a_request_and_comes_to_an_end(codec: Codec) -> None:
    pairs = [
        ("dog", "boat"),
        ("cat", "hat"),
        ("frog", "key"),
        ("princess", "dragon"),
        ("car", "tree"),
        ("bear", "cake"),
    ]
    requests = [REQUEST.format(f"a {first}", f"a {second}") for first, second in pairs]
    answers = ask(load_model(FOLDER), codec, requests, temperature=0.0, seed=0)
    followed = [
        mentions(story, pair[0]) or mentions(story, pair[1]) for pair, (story, _) in zip(pairs, answers, strict=True)
    ]
    assert sum(followed) >= 5
    assert sum(ended for _, ended in answers) >= 5
