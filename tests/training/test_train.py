"""The scripts from end to end, on a corpus of seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training import little
from training import evaluate, generate, train
from training.data import Message
from training.model import Llama, ModelConfig, load_model
from training.optim import orthogonalise
from training.tokenizer import load_tokenizer

SIZES = (
    "--vocab-size 400 --hidden-size 32 --intermediate-size 64 --num-hidden-layers 2 --num-attention-heads 2 "
    "--num-key-value-heads 1 --head-dim 16 --max-position-embeddings 512 --batch-tokens 2048 --evaluate-every 5 "
    "--max-steps 20 --dropout 0 --device cpu"
)
TINY = SIZES.split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return little.files(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    train.main([*text, *TINY, "--out", str(folder)])
    return folder


def test_twenty_steps_lower_the_loss(trained: Path) -> None:
    curve = json.loads((trained / "training.json").read_text())["curve"]
    assert curve["train_loss"][-1] < 0.8 * curve["train_loss"][0]
    assert curve["validation_bits"][-1] < curve["validation_bits"][0]


def test_tales_alone_can_be_trained_on_and_too_little_text_is_refused(tmp_path: Path) -> None:
    tales = tmp_path / "tales.txt"
    tales.write_text("***".join(little.stories()), encoding="utf-8")
    options = ["--fairytales", str(tales), *TINY, "--max-steps", "2", "--out", str(tmp_path / "model")]
    train.main([*options, "--separator", "***"])
    assert json.loads((tmp_path / "model/training.json").read_text())["curve"]["validation_bits"][0] > 0
    with pytest.raises(SystemExit, match="separator"):
        train.main(options)


def test_the_folder_loads_here_and_in_transformers_with_equal_logits(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 400, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(load_model(trained)(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_draft_learns_from_its_target_and_is_measured_against_it(
    trained: Path, text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main([str(trained), *text, "--out", str(tmp_path / "own.jsonl"), "--count", "4", "--device", "cpu"])
    draft = tmp_path / "draft"
    teacher = ["--tokenizer", str(trained), "--teacher", str(trained), "--synthetic", str(tmp_path / "own.jsonl")]
    train.main([*text, *TINY, *teacher, "--max-steps", "2", "--out", str(draft)])
    evaluate.main([str(trained), *text, "--draft", str(draft), "--out", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 0 < figures["acceptance"]["1.0"] <= 1
    assert figures["bits_per_byte_stories"] > 0
    assert "bits_per_byte_tales" in capsys.readouterr().out


def test_cached_sampling_agrees_with_the_whole_forward_pass(trained: Path) -> None:
    model, codec = load_model(trained), load_tokenizer(trained)
    prompts = [codec.encode("Once upon a time there was"), codec.encode("One")]
    for prompt, found in zip(prompts, model.sample(prompts, -1, 12, 0.0), strict=True):
        tokens = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert tokens[len(prompt) :] == found


def test_the_prompt_is_what_the_template_renders(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [Message(role=role, content=f" {role}! ") for role in ("system", "user", "assistant", "user")]
    theirs = transformers.AutoTokenizer.from_pretrained(trained).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert load_tokenizer(trained).prompt(messages) == theirs["input_ids"]


def test_dropout_is_off_when_it_should_be() -> None:
    model = Llama(ModelConfig(64, 32, 64, 1, 2, 1, 16, 32), dropout=0.5).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("shape", [(3, 16, 8), (3, 8, 16)])
def test_muon_updates_are_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    update = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update.float())
    assert float(values.min()) > 0.4
    assert float(values.max()) < 1.4
